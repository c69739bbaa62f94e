"""Logging to the terminal, and a context for reports that may fail without ending a run.

One line an event, from the ranks in ``LOG_RANK``; errors from all.
"""

import errno
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torchtrain.errors import StoppedError, TorchtrainError

logger = logging.getLogger("torchtrain")


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore that a terminal or a log file cannot be written to."""


def init_logging() -> None:
    """Send the package's messages to stderr. Ranks that are not in ``LOG_RANK`` (such as 0,3) only log errors."""
    rank = os.environ.get("RANK", "0")
    shown = os.environ.get("LOG_RANK", "0").split(",")
    handler = _Handler(sys.stderr)
    prefix = "" if shown == [rank] else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank in shown else logging.ERROR)
    logger.propagate = False


def is_first_rank() -> bool:
    """Whether this is the first process that torchrun started, the only one, or one whose RANK is no number."""
    rank = os.environ.get("RANK", "0")
    return rank == "0" or not rank.isdecimal()


def run_door(run: Callable[[], int]) -> int:
    """Call ``run``, which returns an exit code. A TorchtrainError becomes its exit code and one message; so do Ctrl-C,
    a disk that is full, a path that is too long, and output that nobody reads, as of ``| head``.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal that is not in UTF-8
    init_logging()
    try:
        code = run()
        sys.stdout.flush()
        return code
    except TorchtrainError as error:
        if is_first_rank() or (not isinstance(error, StoppedError) and _is_alone()):
            logger.error("error: %s", error)
        if isinstance(error, StoppedError):
            os._exit(error.exit_code)  # a thread that hangs would keep the process
        return error.exit_code
    except KeyboardInterrupt:
        if is_first_rank():
            logger.error("stopped by Ctrl-C")
        return 128 + signal.SIGINT
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG):
            raise
        what = "used" if error.errno == errno.ENAMETOOLONG else "written"
        logger.error("error: %s cannot be %s: %s", error.filename or "the output", what, error.strerror)
        return TorchtrainError.exit_code
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # Python would end with a code of its own
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _is_alone() -> bool:
    """Whether no other rank of this node has told of its error, at which torchrun would have ended this one."""
    torch: Any = sys.modules.get("torch")
    if "TORCHELASTIC_RUN_ID" not in os.environ or torch is None or torch.distributed.is_initialized():
        return False  # once the ranks have met, all have the same error
    time.sleep(2 + int(os.environ["LOCAL_RANK"]) / 8)  # one after the other, and before launch.SHARED_ENDING_SECONDS
    return True


class BestEffort:
    """A context for what only reports: its errors are suppressed. Of several in a row the first is logged."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.failing = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
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
