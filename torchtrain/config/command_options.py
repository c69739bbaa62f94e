"""Options of the commands that do not take the trainer's: a dataclass, parsed from the command line, and ``--help``."""

import dataclasses
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torchtrain.config.help import MAX_WIDTH, choices, docstrings_of, toml, value_of, wrapped_description
from torchtrain.config.parse import closest, convert, from_words
from torchtrain.config.section import key_of
from torchtrain.errors import ConfigError

T = TypeVar("T")

POSITIONAL = "positional"
"""Annotates a field whose values are given without the name of an option."""

OPTION = re.compile(r"--?[A-Za-z][\w.-]*(=.*)?", re.DOTALL)  # other words are values, such as -1 or "-- a comment"


def parse_command(
    options: type[T], name: str, description: str | None, argv: Sequence[str], print_help: bool = True
) -> T:
    """The ``options``, a dataclass, in ``argv`` of the command ``name``; ``--help`` prints a page and ends the process.

    Args:
        description: the docstring of the command.
        print_help: whether this process prints the page of ``--help``.

    Raises:
        ConfigError: an option is unknown, missing or invalid. One message lists all of them, one per line.
        SystemExit: after ``--help``.
    """
    prog = f"python -m torchtrain.{name}"
    if not {"-h", "--help"}.isdisjoint(argv):
        if print_help:
            width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
            sys.stdout.write(command_help(options, prog, description or "", width) + "\n")
        raise SystemExit(0)
    arguments = arguments_of(options)
    given, values_without_option, problems = _split(argv, arguments)
    if not problems:  # else a value without an option may be that of an unknown one
        positional = [argument for argument in arguments.values() if argument.is_positional]
        for argument in positional:
            number = len(values_without_option) if argument.is_list else 1
            if words := values_without_option[:number]:
                given[argument.key] = words
            del values_without_option[:number]
        missing = [argument.shown for key, argument in arguments.items() if argument.is_required and key not in given]
        problems += [f"{name} needs {' and '.join(missing).replace(' ...', '')}"] if missing else []
        problems += [f"{word!r} is one argument too many of {name}" for word in values_without_option[:1]]
        if problems:
            problems[-1] += f": {' '.join(usage(prog, arguments))}; see --help"
    values = {}
    for key, words in given.items():
        try:
            values[arguments[key].field_name] = arguments[key].value(words)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n  ".join(["the command line:", *problems] if len(problems) > 1 else problems))
    return options(**values)


@dataclasses.dataclass(frozen=True)
class Argument:
    """One field of a dataclass of options, as it is given on the command line."""

    field_name: str
    hint: Any
    """Its type, without annotations and None."""
    default: Any
    is_positional: bool

    @property
    def key(self) -> str:
        return key_of(self.field_name)

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.hint) is tuple

    @property
    def shown(self) -> str:
        """Its name and what stands for its value, such as ``--step INTEGER`` or ``FILES ...``."""
        if self.is_positional:
            return f"{self.key.upper()}{' ...' * self.is_list}"
        value = "|".join(map(str, choices(self.hint))) or value_of(self.hint)
        return f"--{self.key}" if self.hint is bool else f"--{self.key} {value}"

    @property
    def usage(self) -> str:
        return self.shown if self.is_required else f"[{self.shown}]"

    def value(self, words: Sequence[str]) -> Any:
        """The value that ``words`` of the command line are. Raises ConfigError if they have another type."""
        value = from_words(self.hint, words, self.key)
        if self.hint is str:  # as it is: it may have bytes that are not UTF-8
            return value
        if self.hint == tuple[str, ...]:
            return tuple(value)
        return convert(self.hint, value, f"--{self.key}")


def arguments_of(options: type) -> dict[str, Argument]:
    """The fields of the dataclass ``options`` by their names on the command line."""
    hints, annotated = typing.get_type_hints(options), typing.get_type_hints(options, include_extras=True)
    arguments = []
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        if typing.get_origin(hint) in (types.UnionType, typing.Union):  # X | None
            hint = typing.get_args(hint)[0]
        is_positional = POSITIONAL in getattr(annotated[field.name], "__metadata__", ())
        arguments.append(Argument(field.name, hint, field.default, is_positional))
    return {argument.key: argument for argument in arguments}


def _split(argv: Sequence[str], arguments: Mapping[str, Argument]) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """The options in ``argv`` with their words, the values that no option precedes, and messages about other options.

    An option has one value, a list all up to the next option, and a boolean none, or true or false.
    """
    named = {key: argument for key, argument in arguments.items() if not argument.is_positional}
    given: dict[str, list[str]] = {}
    others: list[str] = []
    problems: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not OPTION.fullmatch(word):
            others.append(word)
            continue
        option, equals, value = word.partition("=")
        key = option[2:].replace("-", "_")
        if not option.startswith("--"):
            problems.append(f"{option} is not a known option: options are named --OPTION; see --help")
        elif key not in named:
            near = closest(key, named)
            listed = ", ".join(f"--{name}" for name in named)
            hint = f"did you mean '--{near}'?" if near else f"there are {listed}"
            problems.append(f"{option} is not a known option; {hint}")
        else:
            argument = named[key]
            most = len(rest) if argument.is_list else 1
            words = [value] if equals else []
            while rest and len(words) < most and not (rest[0].startswith("--") and OPTION.fullmatch(rest[0])):
                if argument.hint is bool and rest[0].lower() not in ("true", "false"):
                    break
                words.append(rest.pop(0))
            given[key] = words
    return given, others, problems


def usage(prog: str, arguments: Mapping[str, Argument]) -> list[str]:
    """The words of the command: those that are required, and what may follow."""
    shown = [argument.usage for argument in arguments.values() if argument.is_positional or argument.is_required]
    return [prog, *shown, "[--OPTION VALUE ...]"]


def command_help(options: type, prog: str, description: str, width: int) -> str:
    """The text of ``--help`` of a command: usage, ``description`` and each of the ``options``."""
    texts = docstrings_of(options)
    positional: list[str] = []
    named: list[str] = []
    arguments = arguments_of(options)
    for argument in arguments.values():
        is_told = not argument.is_required and argument.default not in (None, "", ()) and argument.default is not False
        required = "  (required)" * (argument.is_required and not argument.is_positional)
        default = f"  (default: {toml(argument.default)})" if is_told else ""
        lines = positional if argument.is_positional else named
        heading = argument.usage if argument.is_positional else argument.shown
        lines.append(f"  {heading}{required}{default}")
        text = texts[argument.field_name]
        lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    text = " ".join(["usage:", *usage(prog, arguments)])
    head = textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
    if positional:
        positional.append("")
    return "\n".join([*head, "", *wrapped_description(description, width), *positional, *named])
