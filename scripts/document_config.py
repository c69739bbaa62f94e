"""Write docs/configuration.md from the dataclasses in torchtrain/config/schema.py: python scripts/document_config.py"""

import ast
import dataclasses
import inspect
import itertools
import types
import typing
from pathlib import Path
from typing import Any, Literal

from torchtrain.config.parse import to_dict
from torchtrain.config.schema import JobConfig

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
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


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
