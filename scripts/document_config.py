"""Write two pages in docs/: python scripts/document_config.py

configuration.md is made of the dataclasses in torchtrain/config/schema.py, from-torchtitan.md of the table in
torchtrain/assets/from_torchtitan.toml.
"""

import ast
import dataclasses
import inspect
import itertools
import types
import typing
from pathlib import Path
from typing import Any, Literal

import tomli

from torchtrain.config.parse import FROM_TORCHTITAN, to_dict
from torchtrain.config.schema import JobConfig

DOCS = Path(__file__).parent.parent / "docs"
HEAD = """\
# Configuration

Made by `python scripts/document_config.py` from
[torchtrain/config/schema.py](../torchtrain/config/schema.py); a test says so when it is out of date.

Options come from three places, the later winning: the defaults below, the TOML file of `--job.config_file`, the command
line. In the file an option stands under its section (`[training]`, then `steps = 100`), on the command line it is
`--training.steps 100`. Booleans are flags there: `--compile.enable`, `--compile.no-enable`. What is misspelt, of the
wrong type or impossible is an error that names the key, before any work starts. The resolved config of a run lies in
its dump folder as `config.toml`.
"""

FROM_TORCHTITAN_HEAD = """\
# Coming from torchtitan

Made by `python scripts/document_config.py` from
[torchtrain/assets/from_torchtitan.toml](../torchtrain/assets/from_torchtitan.toml); a test says so when it is out of
date.

Sections and keys are those of torchtitan's TOML files from its first year, where the thing is the same. The table names
every key of its versions 0.1 and 0.2, and of the months before. A file from there is refused with one message that
names all keys that are others here, and what they are. **Look at the defaults that differ, too**: a key that is not
written in the file changes a run silently. Where a default differs, both are given.

Booleans on the command line are flags in both: `--compile.enable`. To switch one off: `--compile.no-enable`.

Checkpoints of torchtitan are not read. Their Hugging Face export is: `checkpoint.initial_load_path`.
"""


def field_texts(section: type) -> dict[str, str]:
    """The text under each field of a dataclass and of those it inherits from."""
    texts: dict[str, str] = {}
    for owner in reversed(section.__mro__[:-1]):
        body = ast.parse(inspect.getsource(owner)).body[0].body
        for statement, after in itertools.pairwise(body):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(statement, ast.AnnAssign) and is_text:
                texts[statement.target.id] = inspect.cleandoc(after.value.value)
    return texts


def type_name(hint: Any) -> str:
    """A type as a user of TOML thinks of it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_name(argument) for argument in arguments if argument is not type(None))
    if origin is Literal:
        return " or ".join(f"`{toml(argument)}`" for argument in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if dataclasses.is_dataclass(hint):
        return f"table ([{hint.__name__}](#{hint.__name__.lower()}))"
    return {int: "integer", float: "number", bool: "boolean", str: "string"}[hint]


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def table(section: type, prefix: str) -> list[str]:
    texts, hints = field_texts(section), typing.get_type_hints(section, include_extras=True)
    lines = ["| option | default | type | |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(section):
        if field.default is not dataclasses.MISSING:
            default = "" if field.default is None else f"`{toml(field.default)}`"
        else:
            is_single = field.default_factory is dataclasses.MISSING or dataclasses.is_dataclass(hints[field.name])
            default = "" if is_single else "`[]`"
        text = " ".join(texts[field.name].split()).replace("|", "\\|")
        lines.append(f"| `{prefix}{field.name}` | {default} | {type_name(hints[field.name])} | {text} |")
    return lines


def collect(section: type, nested: dict[str, type]) -> None:
    """Add the dataclasses that the fields of ``section`` hold, and those in them."""
    for hint in typing.get_type_hints(section).values():
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part):
                nested[part.__name__] = part
                collect(part, nested)


def render() -> str:
    """The page."""
    lines = [HEAD]
    hints = typing.get_type_hints(JobConfig)
    nested: dict[str, type] = {}
    for section in to_dict(JobConfig()):
        hint = hints[section]
        lines.append(f"## [{section}]\n")
        documentation = inspect.cleandoc(hint.__doc__ or "")
        if documentation and not documentation.startswith(
            hint.__name__ + "("
        ):  # a dataclass without one gets its signature
            lines.append(documentation.replace("\n", " ") + "\n")
        lines += [*table(hint, f"{section}."), ""]
        collect(hint, nested)
    for name, hint in nested.items():
        lines += [f"## {name}\n", *table(hint, ""), ""]
    return "\n".join(lines)


def render_from_torchtitan() -> str:
    """The page."""
    options = {f"{name}.{key}": value for name, keys in to_dict(JobConfig()).items() for key, value in keys.items()}
    lines, section = [FROM_TORCHTITAN_HEAD], ""
    for name, (here, default, note) in FROM_TORCHTITAN.items():
        if name.split(".")[0] != section:
            section = name.split(".")[0]
            lines += ["", f"## [{section}]", "", "| torchtitan | here | default there | default here | |"]
            lines.append("|" + " --- |" * 5)
        there, defaults = tomli.loads(f"x = {default or 0}")["x"], "|"
        if default and here in options and type(there) is type(options[here]) and there != options[here]:
            defaults = f"**`{default}`** | **`{toml(options[here])}`**"
        mine = "the same" if here == name else f"`{here}`" if here else ""
        lines.append(f"| `{name}` | {mine} | {defaults} | {note} |")
    return "\n".join(lines) + "\n"


PAGES = {"configuration.md": render, "from-torchtitan.md": render_from_torchtitan}

if __name__ == "__main__":
    for name, render_page in PAGES.items():
        (DOCS / name).write_text(render_page(), encoding="utf-8")
