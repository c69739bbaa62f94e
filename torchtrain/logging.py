"""Logging to stderr: one line per event from the ranks in ``LOG_RANK``, errors from all."""

import logging
import os
import sys
import textwrap
from collections.abc import Iterable
from contextlib import AbstractContextManager

logger = logging.getLogger("torchtrain")


class _PlainFormatter(logging.Formatter):
    """Escapes control characters as ``repr`` does, so that a quoted file name cannot send commands to the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in super().format(record))


def init_logging() -> None:
    """Send the package's log to stderr. Ranks that are not listed in ``LOG_RANK`` (such as 0,3) log only errors."""
    rank = os.environ.get("RANK", "0")
    shown = os.environ.get("LOG_RANK", "0").split(",")
    handler = logging.StreamHandler(sys.stderr)
    # Ignore that a terminal or a log file cannot be written: it must not end a run.
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # noqa: ARG005
    prefix = "" if shown == [rank] else f"[rank {rank}] "
    handler.setFormatter(_PlainFormatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank in shown else logging.ERROR)
    logger.propagate = False


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


def aligned(rows: Iterable[tuple[str, str]], width: int | None = None) -> str:
    """Lines of labels and texts in two columns, indented by two spaces; texts are wrapped to ``width`` if it is given.

    Of consecutive rows with the same label, only the first shows it.
    """
    rows = list(rows)
    column = 2 + max(len(label) for label, _ in rows) + 2
    lines, shown = [], ""
    for label, text in rows:
        room = max(20, width - column) if width else len(text) + 1
        for part in textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False):
            lines.append(f"{'' if label == shown else f'  {label}':{column}}{part}")
            shown = label
    return "\n".join(lines)
