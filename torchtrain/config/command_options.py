"""Options of the commands that do not take the trainer's: parsed by tyro from a dataclass, with pages of ``--help``."""

import dataclasses
import shutil
import sys
import textwrap
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from torchtrain.config.help import MAX_WIDTH, choices, docstrings_of, toml, value_of, wrapped_description

T = TypeVar("T")


def parse_command(
    options: type[T], name: str, description: str | None, argv: Sequence[str], console_outputs: bool = True
) -> T:
    """The ``options``, a dataclass, in ``argv`` of the command ``name``; ``--help`` prints a page and ends the process.

    Args:
        description: the docstring of the command.
        console_outputs: whether this process prints the page and errors.
    """
    prog = f"python -m torchtrain.{name}"
    if not {"-h", "--help"}.isdisjoint(argv):
        if console_outputs:
            width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
            sys.stdout.write(command_help(options, prog, description or "", width) + "\n")
        raise SystemExit(0)
    return tyro.cli(options, prog=prog, args=argv, use_underscores=True, console_outputs=console_outputs)


def command_help(options: type, prog: str, description: str, width: int) -> str:
    """The text of ``--help`` of a command: usage, ``description`` and each of the ``options``."""
    hints = typing.get_type_hints(options, include_extras=True)
    texts = docstrings_of(options)
    positional: list[str] = []
    named: list[str] = []
    usage = [f"usage: {prog}"]
    for field in dataclasses.fields(options):
        hint, name = hints[field.name], field.name.rstrip("_")
        is_required = field.default is dataclasses.MISSING
        if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
            several = " ..." if typing.get_origin(hint.__args__[0]) is tuple else ""
            shown = f"{name.upper()}{several}"
            usage.append(shown if is_required else f"[{shown}]")
            heading, lines = shown, positional
        else:
            value = "" if _bare(hint) is bool else f" {_value(hint)}"
            required = "  (required)" * is_required
            if is_required:
                usage.append(f"--{name}{value}")
            is_told = not is_required and field.default not in (None, "", ()) and field.default is not False
            default = f"  (default: {toml(field.default)})" if is_told else ""
            heading, lines = f"--{name}{value}{required}{default}", named
        lines.append(f"  {heading}")
        lines += textwrap.wrap(texts[field.name], width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    usage.append("[--OPTION VALUE ...]")
    head = textwrap.wrap(" ".join(usage), width, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join([*head, "", *wrapped_description(description, width), *positional, "", *named])


def _bare(hint: Any) -> Any:
    return hint.__args__[0] if hasattr(hint, "__metadata__") else hint


def _value(hint: Any) -> str:
    """What stands for the value: its choices, or its type as ``--help`` of the trainer shows it."""
    return "|".join(map(str, choices(hint))) or value_of(hint)
