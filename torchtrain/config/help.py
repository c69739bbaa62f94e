"""The pages of ``--help``: an overview of the sections, and the options of each; and the docstrings that they show."""

import ast
import dataclasses
import functools
import inspect
import json
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from torchtrain.config.registry import CONFIG_SECTIONS, Registry
from torchtrain.config.schema import JobConfig, section_of, section_types
from torchtrain.config.section import key_of
from torchtrain.errors import ConfigError

MAX_WIDTH = 100
TYPES = {int: "INTEGER", float: "NUMBER", str: "TEXT", bool: "true|false"}


def choices(hint: Any) -> list[Any]:
    """The values of the Literal, or the entries of the registry, in the type ``hint``; an empty list without one."""
    if isinstance(hint, Registry):
        return list(hint)
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    return [choice for argument in typing.get_args(hint) for choice in choices(argument)]


def toml(value: Any) -> str:
    """``value`` as it is written in a TOML file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, tuple | list) else str(value)


def docstrings_of(section: type) -> dict[str, str]:
    """The docstrings of a dataclass of options and of its fields, each as one line; that of the class is named ""."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        found = {**found, "": "", **_docstrings_in(base.__module__).get(base.__name__, {})}
    return found


@functools.cache
def _docstrings_in(module: str) -> dict[str, dict[str, str]]:
    """Docstrings of classes in ``module`` and of their fields, by name of the class; without those of Python itself."""
    found: dict[str, dict[str, str]] = {}
    if module == "builtins":
        return found
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            texts = found[node.name] = {"": ast.get_docstring(node) or ""}
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    texts[field.target.id] = text.value.value  # type: ignore[union-attr, attr-defined]
    return {name: {key: " ".join(text.split()) for key, text in texts.items()} for name, texts in found.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One option, or one table of options, as ``--help`` shows it."""

    name: str  # such as training.steps
    heading: str
    text: str


def entries(name: str, section: type, table: Any) -> Iterator[Entry]:
    """The options of the dataclass ``section`` and of those nested in it, in order; ``name``: its full name.

    Args:
        table: the section of the config file, or None. Values that differ from the defaults are shown.
    """
    hints = typing.get_type_hints(section, include_extras=True)
    texts = docstrings_of(section)
    for field in dataclasses.fields(section):
        hint = hints[field.name]
        full_name, own = f"{name}.{key_of(field.name)}", getattr(table, field.name, None)
        text = texts.get(field.name, "").removeprefix(f"[{full_name}]: ")
        if dataclasses.is_dataclass(hint):
            yield Entry(full_name, f"[{full_name}]", text)
            yield from entries(full_name, hint, own)  # type: ignore[arg-type]
        elif typing.get_origin(hint) is dict:
            yield Entry(full_name, f"[{full_name}]  in the config file", text)
        elif any(dataclasses.is_dataclass(argument) for argument in typing.get_args(hint)):
            yield Entry(full_name, f"[[{full_name}]]  in the config file", text)
        else:
            given = [] if field.default in (None, dataclasses.MISSING) else [f"default: {toml(field.default)}"]
            if own is not None and own != field.default:
                given.append(f"config file: {toml(own)}")
            values = f" Values: {', '.join(map(str, choices(hint)))}." if choices(hint) else ""
            shown = f"  ({'; '.join(given)})" if given else ""
            yield Entry(full_name, f"--{full_name} {value_of(hint)}{shown}", text + values)


def value_of(hint: Any) -> str:
    """What stands for a value of the type ``hint``, such as INTEGER, or ``TEXT ...`` for a list of strings."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):  # X | None, or X | tuple[X, ...]
        return value_of(arguments[-1] if arguments[-1] is not types.NoneType else arguments[0])
    if origin is tuple:
        return f"{value_of(arguments[0])} ..."
    if origin is typing.Annotated:
        return value_of(arguments[0])
    return TYPES[type(arguments[0]) if origin is Literal else hint]


def help_page(topic: str, prog: str, description: str, config: JobConfig) -> str:
    """The text of ``--help topic``: all options of a section or table, one option, or the overview of all sections.

    Args:
        prog: name of the command, such as ``torchtrain.train``.
        description: what the command does; shown in the overview.
        config: the config file's values, which are shown where they are not the defaults.

    Raises:
        ConfigError: there is no such section or option.
    """
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    sections = section_types()
    if not topic:
        return overview(prog, description, width)
    section = topic.partition(".")[0]
    found: list[str] = []
    if section in sections:
        if topic == section:
            found += [*textwrap.wrap(f"[{section}] {docstrings_of(sections[section])['']}", width), ""]
        kind = sections[section]
        own_options = section_of(config, kind) if section in CONFIG_SECTIONS else getattr(config, section)
        for entry in entries(section, kind, own_options):
            if f"{entry.name}.".startswith(f"{topic}."):
                found.append(f"  {entry.heading}")
                found += textwrap.wrap(entry.text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    if not found:
        found = options_about(topic, config, width)
    if not found:
        raise ConfigError(f"--help {topic}: there is no such section or option; the sections are {', '.join(sections)}")
    return "\n".join(found)


def options_about(word: str, config: JobConfig, width: int) -> list[str]:
    """Lines about the options of all sections that have ``word``, or one that begins with it: in their name, with their
    description, then those that have it in the description alone, with its first sentence."""
    pattern = re.compile(rf"(?<![a-z0-9]){re.escape(word)}", re.IGNORECASE)
    in_text = re.compile(rf"(?<![a-z0-9.]){re.escape(word)}", re.IGNORECASE)  # not in the name of another option
    by_name: list[str] = []
    by_text: list[str] = []
    for name, kind in section_types().items():
        own_options = section_of(config, kind) if name in CONFIG_SECTIONS else getattr(config, name)
        for entry in entries(name, kind, own_options):
            is_named = pattern.search(entry.name)
            if not is_named and not in_text.search(entry.text):
                continue
            text = entry.text if is_named else f"{entry.text.partition('. ')[0].rstrip('.')}."
            lines = textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
            (by_name if is_named else by_text).extend([f"  {entry.heading}", *lines])
    head = [f"options whose name has {word!r}:", *by_name] if by_name else []
    return head + ([f"options whose description has {word!r}:", *by_text] if by_text else [])


def wrapped_description(description: str, width: int) -> list[str]:
    """Lines of a docstring without its markup; commands are on lines of their own, which are not wrapped."""
    text = re.sub(r": ``(python -m [^`]*)``\.", r".\n\n    \1", description.strip()).replace("``", "")
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(" "):
            lines += [paragraph, ""]
        else:
            lines += [*textwrap.wrap(paragraph, width, break_on_hyphens=False), ""]
    return lines


def overview(prog: str, description: str, width: int) -> str:
    """The text of ``--help``: usage and sections. The section of the command's own options is the first.

    Sections of plugins are listed without a description, so that the text fits on a screen.
    """
    own = prog.rpartition(".")[2]
    sections = section_types()
    lines = [f"usage: python -m {prog} [--SECTION.OPTION VALUE ...]", ""]
    lines += wrapped_description(description, width)
    of_plugins = [name for name in CONFIG_SECTIONS if name != own]
    described = [name for name in sorted(sections, key=lambda name: name != own) if name not in of_plugins]
    lines.append("sections:")
    column = 4 + max(map(len, described))
    for name in described:
        summary = docstrings_of(sections[name])[""].partition(". ")[0].rstrip(".")
        lines.append(f"  {name:{column - 2}}{summary}")
    if of_plugins:
        names = textwrap.wrap(", ".join(of_plugins), width, initial_indent="  ", subsequent_indent="  ")
        lines += ["", "sections of plugins (docs/plugins.md):", *names]
    examples = (
        ("--help training", "all options of a section"),
        ("--help training.steps", "one option"),
        ("--help memory", "options of all sections that have the word"),
        ("docs/configuration.md", "all options on one page"),
    )
    return "\n".join([*lines, "", *(f"  {option:{column - 2}}{text}" for option, text in examples)])
