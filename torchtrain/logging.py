"""Logging to stderr: one line per event from the ranks in ``LOG_RANK``, errors from all.

Only ``log_in_color`` writes escape sequences, and only to a terminal that shows colors.
"""

import itertools
import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

logger = logging.getLogger("torchtrain")


TIME_FORMAT = "%H:%M:%S"
MIN_WIDTH = 20  # of wrapped text


class _Formatter(logging.Formatter):
    """Escapes control characters as ``repr`` does, so that a quoted file name cannot send commands to the terminal.

    The colors of ``log_in_color`` are added afterwards.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = _escaped(super().format(record))
        if (width := terminal_width()) is not None:
            text = "\n".join(wrapped(line, width) for line in text.split("\n"))
        commands: Sequence[str] = getattr(record, "commands", ())
        text += "".join(f"\n    {_escaped(command)}" for command in commands)
        colored: str | None = getattr(record, "colored", None)
        return text if colored is None else text.replace(record.message, colored)


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def wrapped(line: str, width: int) -> str:
    """``line`` with line breaks between words, where a terminal would break it inside of one."""
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())] + "  "
    wrapper = textwrap.TextWrapper(
        max(width, MIN_WIDTH),
        subsequent_indent=indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.fill(line)


def init_logging() -> None:
    """Send the package's log to stderr. Ranks that are not listed in ``LOG_RANK`` (such as 0,3) log only errors."""
    rank = os.environ.get("RANK", "0")
    shown = os.environ.get("LOG_RANK", "0").split(",")
    handler = logging.StreamHandler(sys.stderr)
    # Ignore that a terminal or a log file cannot be written: it must not end a run.
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # noqa: ARG005
    handler.setFormatter(_Formatter(f"%(asctime)s {_rank_prefix()}%(message)s", datefmt=TIME_FORMAT))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank in shown else logging.ERROR)
    logger.propagate = False


def _rank_prefix() -> str:
    """What precedes the messages of this rank, if it is not the only one that logs."""
    rank = os.environ.get("RANK", "0")
    return "" if os.environ.get("LOG_RANK", "0").split(",") == [rank] else f"[rank {rank}] "


def log_in_color(words: Sequence[tuple[str, str]]) -> None:
    """Log a line of words, given with the numbers of their colors (ECMA-48; "0" for none)."""
    plain = "  ".join(text for _, text in words)
    colored = "  ".join(text if color == "0" else f"\033[{color}m{text}\033[0m" for color, text in words)
    logger.info("%s", plain, extra={"colored": colored} if terminal_has_colors() else {})


def log_with_commands(message: str, head: str, commands: Sequence[str]) -> None:
    """Log ``message``, then the line ``head`` and ``commands``, if there are any.

    Each command is on a line of its own that is never wrapped, so that it can be copied.
    """
    logger.info("%s", f"{message}\n{head}" if commands else message, extra={"commands": commands})


class BestEffort(AbstractContextManager["BestEffort"]):
    """A context manager for metrics, logs and reports, whose failures must not end a run.

    It suppresses every ``Exception`` of its body. Of several failures in a row it logs the first one, and then the
    first success. ``what`` names in these messages what the body writes.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.failing = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            if self.failing:
                logger.info("%s: works again", self.what)
            self.failing = False
            return False
        if not isinstance(error, Exception):
            return False
        if not self.failing:
            logger.warning("%s: %s; training continues without it", self.what, error)
        self.failing = True
        return True


def terminal_width() -> int | None:
    """Columns of the terminal that the log is written to; None if it is written to a file or a pipe."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (AttributeError, OSError, ValueError):  # no terminal, no file, or closed
        return None


def output_width() -> int | None:
    """Columns of the terminal that stdout is; None if it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def message_width() -> int | None:
    """Columns that a message of the log may have so that its line is not wrapped; None where nothing is wrapped."""
    width = terminal_width()
    return None if width is None else width - len(f"{time.strftime(TIME_FORMAT)} {_rank_prefix()}")


def is_dumb_terminal() -> bool:
    """Whether the terminal says that it has neither colors nor a cursor that moves (``TERM=dumb``)."""
    return os.environ.get("TERM") == "dumb"


def terminal_has_colors() -> bool:
    """Whether the log is written to a terminal in color; ``NO_COLOR`` turns colors off (https://no-color.org)."""
    return terminal_width() is not None and not is_dumb_terminal() and not os.environ.get("NO_COLOR")


def ranges(numbers: Iterable[int]) -> str:
    """Format sorted ``numbers`` as ranges: ``[0, 1, 2, 5]`` becomes ``0-2, 5``."""
    runs = itertools.groupby(enumerate(numbers), key=lambda at: at[1] - at[0])
    parts = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def ranks_text(numbers: Sequence[int]) -> str:
    """Sorted numbers of ranks, such as "rank 3" or "ranks 0-2, 5"."""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {ranges(numbers)}"


def counted(number: int, noun: str) -> str:
    """A number and a noun in its plural, unless the number is 1: "1 rank", "4,000 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def aligned(rows: Iterable[tuple[str, str]], width: int | None = None) -> str:
    """Lines of labels and texts in two columns, indented by two spaces; texts are wrapped to ``width`` if it is given.

    Of consecutive rows with the same label, only the first shows it.
    """
    rows = list(rows)
    column = 2 + max(len(label) for label, _ in rows) + 2
    lines, shown = [], ""
    for label, text in rows:
        room = max(MIN_WIDTH, width - column) if width else len(text) + 1
        for part in textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False):
            lines.append(f"{'' if label == shown else f'  {label}':{column}}{part}")
            shown = label
    return "\n".join(lines)
