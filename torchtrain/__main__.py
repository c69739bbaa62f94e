"""List the commands: ``python -m torchtrain``."""

import ast
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from torchtrain.cli import command, run_and_exit
from torchtrain.config.parse import closest
from torchtrain.errors import ConfigError


def commands() -> dict[str, str]:
    """The modules of the package that are commands, and what each does: the first line of its docstring."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("[a-z]*.py"), key=lambda file: (file.stem != "train", file.stem)):
        text = file.read_text(encoding="utf-8")
        if "run_and_exit(main)" in text:
            summary = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            found[file.stem] = summary.partition(": ``")[0].rstrip(".")
    return found


@command
def main(argv: Sequence[str]) -> int:
    """Print the list; returns the exit code of the process."""
    found = commands()
    if argv and argv[0] not in ("-h", "--help"):
        name, *arguments = argv if not argv[0].startswith("-") else ("COMMAND", *argv)
        if name in (*found, "COMMAND"):
            line = shlex.join([name, *arguments])
            raise ConfigError(f"a command is a module of its own: python -m torchtrain.{line}")
        near = closest(name, found)
        hint = f"did you mean python -m torchtrain.{shlex.join([near, *arguments])}?" if near else "see --help"
        raise ConfigError(f"{name!r} is not a command; {hint}")
    column = 4 + max(map(len, found))
    lines = ["usage: python -m torchtrain.COMMAND [--help]", ""]
    for name, summary in found.items():
        start, indent = f"  {name:{column - 2}}", " " * column
        lines += textwrap.wrap(summary, 80, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)
    sys.stdout.write("\n".join([*lines, "", "The first run, and a page for each goal: README.md", ""]))
    return 0


if __name__ == "__main__":
    run_and_exit(main)
