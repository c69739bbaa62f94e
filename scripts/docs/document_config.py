"""Write the generated pages of the documentation: python scripts/docs/document_config.py

docs/configuration.md is generated from the sections of torchtrain/config/schema.py, docs/from-torchtitan.md from the
table in torchtrain/plugins/from_torchtitan/options.toml.
"""

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

from torchtrain.config.help import choices, docstrings_of, toml
from torchtrain.config.schema import section_types, to_dict
from torchtrain.config.section import key_of
from torchtrain.datasets.options import SourceConfig, SourcesConfig
from torchtrain.plugins.from_torchtitan.options import TOML_ENDS, torchtitan_options

ROOT = Path(__file__).parent.parent.parent
HEAD = """\
# Configuration

```bash
python -m torchtrain.train --help
python -m torchtrain.train --help training
```

show all sections, and the options of a section with their documentation. This page lists the options of all sections.
`python scripts/docs/document_config.py` generates it from the `options.py` of the folders of `torchtrain`.

Options are set in a TOML file (`--job.config_file`), on the command line, or both; the command line overrides the file.
An option in tokens and the same in steps replace each other: `--training.tokens 20B` that of `steps` in the file.

`[[stages]]`, a run in several stages, is described in [stages](stages.md).

| in the TOML file | on the command line |
| --- | --- |
| `steps = 100` under `[training]` | `--training.steps 100` |
| `enable = true` under `[compile]` | `--compile.enable` or `--compile.enable true` |
| `enable = false` under `[compile]` | `--compile.no-enable` or `--compile.enable false` |

An unknown option, a value of the wrong type, or an invalid combination is an error before any work starts. An option
without a default is not set (`None` in its description).
"""

FROM_TORCHTITAN_HEAD = """\
# Migrating from torchtitan

```bash
python -m torchtrain.convert_config torchtitan_config.toml --output my_config.toml
```

converts a TOML file of torchtitan, of any version from 2024-02 to 0.2.2 (2026-02). The file is written only if it is
valid; without `--output` it is printed. Comments are kept, values are converted (`"AdamW"`, `"c4"`,
`["quantize.linear.float8"]`), and an option without a counterpart becomes a comment that says why. If it had an effect
in torchtitan, it is also printed, as "left out". What is left to set, such as the tokenizer, is printed, and at the end
of the file. The exit code is 2 if an option must be changed by hand, for example if the model is none of torchtrain's.

**Defaults.** Defaults of torchtitan that differ from torchtrain's, such as the linear decay, are written out, and norms
decay as there (`optimizer.no_decay`). Defaults differ between versions, too. The second line of the converted file
names the versions that have all options of the file; its defaults are those of the newest of them. If no version has
all of them, they are those of 0.2.2.

**Models.** Sizes that torchtrain does not have, such as torchtitan's `debugmodel`, are written as `[model.shape]`, and
`8B_flex` as `8B` with `data.document_mask = true`. torchtitan scales the RoPE of Llama 3 since 2025-10-08; for older
files the scaling is turned off. The size of the vocabulary is that of the tokenizer.

**Without conversion.** The trainer rejects a file of torchtitan, and options of torchtitan on the command line, with
one message that names torchtrain's option for each.

**Python configs.** Since 2026-02-23 torchtitan's configs are Python functions. `convert_config` does not read them.
Begin with a file of `train_configs/`; the last table has the options of these functions, too.

torchtitan's default `dump_folder = "./outputs"` is kept, and here a folder has one run: for a first short try, add
`--job.dump_folder outputs/trial`, and give each config a folder of its own.

torchtrain loads weights that torchtitan has exported in Hugging Face's format (`checkpoint.initial_load_path`). It
does not load torchtitan's distributed checkpoints.
"""


def as_markdown(text: str) -> str:
    """``text`` with links to the pages that it names."""
    return re.sub(r"docs/([a-z-]+)\.md", r"[\1](\1.md)", text)


def table(section: type) -> Iterator[str]:
    """The lines about a section: the docstring of its class, and its options as a table."""
    hints = typing.get_type_hints(section, include_extras=True)
    inherited = SourceConfig.__dataclass_fields__ if issubclass(section, SourcesConfig) else {}
    texts = docstrings_of(section)
    if texts[""]:
        yield f"{as_markdown(texts[''])}\n"
    yield "| option | default | description |\n| --- | --- | --- |"
    if inherited:
        yield "| the options of a [source](#source) | | |"
    for field in dataclasses.fields(section):
        if field.name in inherited:
            continue
        default = "" if field.default in (None, dataclasses.MISSING) else f"`{toml(field.default)}`"
        values = ", ".join(f"`{toml(value)}`" for value in choices(hints[field.name]))
        values = f" Values: {values}." if values else ""
        yield f"| `{key_of(field.name)}` | {default} | {as_markdown(texts[field.name])}{values} |"
    yield ""


def collect(section: type, nested: dict[str, type]) -> None:
    """Add the dataclasses in the types of the fields of ``section`` to ``nested``, recursively."""
    for hint in typing.get_type_hints(section).values():
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part):
                nested[TITLES[part.__name__]] = part
                collect(part, nested)


def render() -> str:
    """docs/configuration.md."""
    lines, nested = [HEAD], {}
    hints = section_types()
    for section in SECTIONS:
        lines += [f"## [{section}]\n", *table(hints[section])]
        if section in NOTES:
            lines.append(NOTES[section])
        collect(hints[section], nested)
    for name, hint in nested.items():
        lines += [f"## {name}\n", f"{TABLES[name]}\n", *table(hint)]
    return "\n".join(lines)


NOTES = {  # text below the table of a section
    "lr_scheduler": """\
The schedule has S = `total_steps` steps, of which W are the warm-up and D the decay: D is `decay_ratio` times S, or
S - W if `decay_ratio` is not set. The learning rate of step s, counted from 1, is `optimizer.lr` times (with
`start_step`, s and S count from there; with `initial_lr`, the warm-up begins at that rate)

| step | factor |
| --- | --- |
| s ≤ W | s / W |
| W < s ≤ S + 1 - D | 1 |
| S + 1 - D < s ≤ S | m + (1 - m) f(p), with m = `min_lr_factor` and p = 1 - (S + 1 - s) / D |
| s > S | m |

f(p) is 1 - p (linear), (1 + cos(pi p)) / 2 (cosine) or 1 - sqrt(p) (sqrt). As in torchtitan, the decay would reach the
minimum in step S + 1, so that no step up to S has a learning rate of 0. The learning rate is a function of the step
alone: a resumed run has the learning rates of an uninterrupted one.
""",
}

SECTIONS = {
    name: to_dict(section())
    for name, section in section_types().items()
    if section.__module__.startswith("torchtrain.")  # not of plugins that are installed here
}

TITLES = {  # headings of nested tables by the name of their class; a new class needs an entry here and in TABLES
    "ModelOverrides": "Shape",
    "RopeScalingConfig": "RopeScaling",
    "ParameterGroupConfig": "ParameterGroup",
    "ParameterPatternConfig": "ParameterPattern",
    "SourceConfig": "Source",
}
TABLES = {
    "Shape": "The table `[model.shape]`.",
    "RopeScaling": "The table `[model.shape.rope_scaling]`.",
    "ParameterGroup": "The tables `[optimizer.hidden]`, `[optimizer.embedding]` and `[optimizer.no_decay]`.",
    "ParameterPattern": "Each table `[[optimizer.groups]]`.",
    "Source": "`[data]`, `[validation]`, and each table `[[data.sources]]` and `[[validation.sources]]`.",
}


def render_from_torchtitan() -> str:
    """docs/from-torchtitan.md."""
    values = {f"{name}.{key}": value for name, keys in SECTIONS.items() for key, value in keys.items()}
    differ: list[str] = []
    meaning: list[str] = []
    same: list[str] = []
    every: dict[tuple[str, str], list[str]] = {}
    for name, option in torchtitan_options().items():
        there, mine = option.default, values.get(option.here)
        renamed = "" if option.here == name else f"`{option.here}`"
        if option.here == name:  # a note about it is in one of the first two tables
            same += [] if option.note else [f"`{name}`"]
        else:
            becomes = f"`{option.here}`" if option.here else "none"
            every.setdefault((becomes, as_markdown(option.note)), []).append(f"`{name}`")
        is_of_files = option.exists_before(TOML_ENDS) and type(there) is type(mine)
        if option.here and is_of_files and there is not None and there != mine:
            earlier = "; ".join(f"{toml(value)} until {day}" for day, value in option.before.items())
            note = "; ".join(filter(None, (option.note, earlier)))
            differ.append(f"| `{name}` | {renamed} | **`{toml(there)}`** | **`{toml(mine)}`** | {note} |")
        elif option.here == name and option.note:
            meaning.append(f"| `{name}` | {option.note} |")
    return "\n".join(
        [
            FROM_TORCHTITAN_HEAD,
            "## Defaults that differ\n",
            "| torchtitan's key | torchtrain's key, if renamed | torchtitan's default | torchtrain's default | note |\n"
            + "|"
            + " --- |" * 5,
            *differ,
            "\n## Same name, different meaning\n",
            "| key | in torchtrain |\n| --- | --- |",
            *meaning,
            "\n## Every option of torchtitan\n",
            f"Name and meaning are the same of {', '.join(same)}.\n",
            "These have another name or no counterpart. `torchtrain/plugins/from_torchtitan/options.toml` has\n"
            "the dates between which torchtitan had them.\n",
            "| torchtitan's keys | torchtrain's key | note |\n| --- | --- | --- |",
            *(f"| {', '.join(names)} | {becomes} | {note} |" for (becomes, note), names in every.items()),
            "",
        ]
    )


PAGES = {"docs/configuration.md": render, "docs/from-torchtitan.md": render_from_torchtitan}

if __name__ == "__main__":
    for name, render_page in PAGES.items():
        (ROOT / name).write_text(render_page(), encoding="utf-8")
