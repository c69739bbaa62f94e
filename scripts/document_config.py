"""Write what documents the code: python scripts/document_config.py

docs/configuration.md is made of the dataclasses in torchtrain/config/schema.py, docs/from-torchtitan.md of the table in
torchtrain/assets/from_torchtitan.toml.
"""

import dataclasses
import typing
from pathlib import Path
from typing import Any, Literal

import tomli

from torchtrain.config.parse import FROM_TORCHTITAN, to_dict
from torchtrain.config.schema import JobConfig, SourceConfig, SourcesConfig, key_of

ROOT = Path(__file__).parent.parent
HEAD = """\
# Configuration

`python -m torchtrain.train --help` explains every option. Here are the names, as `option=default|other choices`;
without a value an option is not set. Written by `python scripts/document_config.py`.

`steps = 100` under `[training]` is `--training.steps 100` on the command line; `enable = true` under `[compile]` is
`--compile.enable`, and `enable = false` is `--compile.no-enable`.

The command line wins over the TOML file of `--job.config_file`. An unknown option, a wrong type or an impossible
combination is an error before any work starts.
"""

FROM_TORCHTITAN_HEAD = """\
# Coming from torchtitan

Give your TOML file of torchtitan 0.1 or 0.2 to the trainer: one message names every key that has another name here or
does not exist here, and why. Other keys are the same. **Look at the defaults that differ**: they change a run whose
file does not set them.

Of torchtitan's checkpoints the Hugging Face export can be read (`checkpoint.initial_load_path`).
"""


def choices(hint: Any) -> list[Any]:
    """The values of a Literal in ``hint``."""
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    return [choice for argument in typing.get_args(hint) for choice in choices(argument)]


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def options(section: type) -> str:
    """The options of a section with their defaults, in a line."""
    hints, texts = typing.get_type_hints(section, include_extras=True), []
    inherited = SourceConfig.__dataclass_fields__ if issubclass(section, SourcesConfig) else {}
    if inherited:
        texts.append("the keys of [Source](#source)")
    for field in dataclasses.fields(section):
        if field.name in inherited:
            continue
        values = [] if field.default in (None, dataclasses.MISSING) else [field.default]
        values += [choice for choice in choices(hints[field.name]) if choice not in values]
        shown = "|".join(toml(value) for value in values)
        texts.append(f"`{key_of(field.name)}={shown}`" if values else f"`{key_of(field.name)}`")
    return ", ".join(texts) + "\n"


def collect(section: type, nested: dict[str, type]) -> None:
    """Add the dataclasses that the fields of ``section`` hold, and those in them."""
    for hint in typing.get_type_hints(section).values():
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part):
                nested[TITLES[part.__name__]] = part
                collect(part, nested)


def render() -> str:
    """The page."""
    lines, nested = [HEAD], {}
    hints = typing.get_type_hints(JobConfig)
    for section in to_dict(JobConfig()):
        lines += [f"## [{section}]", options(hints[section])]
        if section in NOTES:
            lines.append(NOTES[section])
        collect(hints[section], nested)
    for name, hint in nested.items():
        lines += [f"## {name}\n", f"{TABLES[name]}\n", options(hint)]
    return "\n".join(lines)


NOTES = {  # what a page of defaults does not show
    "lr_scheduler": """\
Of a schedule of S steps (`total_steps`), W are the warm-up, and D the decay: `decay_ratio` times S, or S - W. Step s,
counted from 1, has a rate of `optimizer.lr` times

| step | factor |
| --- | --- |
| up to W | s / W |
| up to S + 1 - D | 1 |
| up to S | floor + (1 - floor) f(p), with p = 1 - (S + 1 - s) / D |
| after S | the floor, `min_lr_factor` |

f(p) is 1 - p (linear), (1 + cos(pi p)) / 2 (cosine) or 1 - sqrt(p). So the decay would reach the floor in step S + 1,
as in torchtitan, and no step up to S has a rate of 0. The rate depends on the step alone: a resumed
run has the rates of one that was never stopped.
""",
}

TITLES = {  # of nested tables, by the name of their class; a KeyError here: name the new one, also below
    "ModelOverrides": "Shape",
    "RopeScalingConfig": "RopeScaling",
    "ParameterGroupConfig": "ParameterGroup",
    "SourceConfig": "Source",
}
TABLES = {
    "Shape": "`[model.shape]`: what is not as the flavor has it.",
    "RopeScaling": "`[model.shape.rope_scaling]`.",
    "ParameterGroup": "`[optimizer.matrices]`, `[optimizer.embeddings]` and `[optimizer.vectors]`.",
    "Source": "Each table `[[data.sources]]` or `[[validation.sources]]`.",
}


def render_from_torchtitan() -> str:
    """The page."""
    values = {f"{name}.{key}": value for name, keys in to_dict(JobConfig()).items() for key, value in keys.items()}
    differ: list[str] = []
    meaning: list[str] = []
    for name, (here, default, note) in FROM_TORCHTITAN.items():
        there = tomli.loads(f"x = {default or 0}")["x"]
        mine = "" if here == name else f"`{here}`"
        if not here:
            continue
        if default and here in values and type(there) is type(values[here]) and there != values[here]:
            differ.append(f"| `{name}` | {mine} | **`{default}`** | **`{toml(values[here])}`** | {note} |")
        elif here == name and note:
            meaning.append(f"| `{name}` | {note} |")
    return "\n".join(
        [
            FROM_TORCHTITAN_HEAD,
            "## Defaults that differ\n",
            "| torchtitan | renamed here | default there | default here | |\n" + "|" + " --- |" * 5,
            *differ,
            "\n## The same name, another meaning\n",
            "| key | |\n| --- | --- |",
            *meaning,
            "",
        ]
    )


PAGES = {"docs/configuration.md": render, "docs/from-torchtitan.md": render_from_torchtitan}

if __name__ == "__main__":
    for name, render_page in PAGES.items():
        (ROOT / name).write_text(render_page(), encoding="utf-8")
