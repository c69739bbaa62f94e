"""Logging to stderr: one line per event from the ranks in ``LOG_RANK``, errors from all."""

import logging
import os
import sys
from contextlib import AbstractContextManager

logger = logging.getLogger("torchtrain")


class _PlainFormatter(logging.Formatter):
    """Writes control characters as Python does: a terminal would obey those in a name that a message quotes."""

    def format(self, record: logging.LogRecord) -> str:
        return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in super().format(record))


def init_logging() -> None:
    """Send the package's messages to stderr. Ranks that are not in ``LOG_RANK`` (such as 0,3) only log errors."""
    rank = os.environ.get("RANK", "0")
    shown = os.environ.get("LOG_RANK", "0").split(",")
    handler = logging.StreamHandler(sys.stderr)
    # That a terminal or a log file cannot be written to is ignored.
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # noqa: ARG005
    prefix = "" if shown == [rank] else f"[rank {rank}] "
    handler.setFormatter(_PlainFormatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank in shown else logging.ERROR)
    logger.propagate = False


class BestEffort(AbstractContextManager["BestEffort"]):
    """A context for what only reports: its errors are suppressed. Of several in a row the first is logged."""

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
            logger.warning("%s: %s; the run goes on without it", self.what, error)
        self.failing = True
        return True
