"""Logging to the terminal, and a context for reports that may fail without ending a run.

One line an event, from the ranks in ``LOG_RANK``; errors from all.
"""

import atexit
import errno
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NoReturn

from torchtrain.environment import limit_error
from torchtrain.errors import StoppedError, StorageError, TorchtrainError
from torchtrain.reading import MAY_PASS

logger = logging.getLogger("torchtrain")

# OSErrors with a cause outside of the program. FULL: of any output. UNUSABLE: of a path that the user or config names.
FULL = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
UNUSABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, *MAY_PASS)
TURN_SECONDS = 2.0


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


def is_first_rank() -> bool:
    """Whether this is the first process that torchrun started, the only one, or one whose RANK is no number."""
    rank = os.environ.get("RANK", "0")
    return rank == "0" or not rank.isdecimal()


def _tell(error: TorchtrainError, *, alone: bool = False) -> None:
    """Log ``error``, once for all ranks that have it. ``alone``: even with a process group, only this one may.

    With a process group all ranks have the same TorchtrainError, and the first one logs it. Before that this rank may
    be alone with it. It waits for its turn, since torchrun kills the other ranks of a node when one ends.
    """
    if not is_first_rank():
        dist = sys.modules.get("torch.distributed")  # a config that is refused needs no torch, and all have the same
        met = dist is None or dist.is_initialized()
        if not (met and alone):
            if met or "TORCHELASTIC_RUN_ID" not in os.environ or isinstance(error, StoppedError):
                return
            time.sleep(TURN_SECONDS + int(os.environ.get("LOCAL_RANK", "0")) / 8)  # < launch.SHARED_ENDING_SECONDS
    logger.error("error: %s", error)


def run_door(run: Callable[[], int]) -> int:
    """Call ``run``, which returns an exit code. A TorchtrainError becomes its exit code and one message; so do Ctrl-C,
    a disk that is full, a path that cannot be used, and output that nobody reads, as of ``| head``.
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
        _tell(error)
        if isinstance(error, StoppedError):
            os._exit(error.exit_code)  # a thread that hangs would keep the process
        return error.exit_code
    except KeyboardInterrupt:
        if is_first_rank():
            logger.error("stopped by Ctrl-C")
        return 128 + signal.SIGINT
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        if limit := limit_error(error):
            _tell(limit, alone=True)
            return limit.exit_code
        if not isinstance(error, OSError):
            raise
        nowhere = error.errno == errno.ENOENT and not error.filename  # as os.getcwd and tempfile raise it
        if error.errno not in FULL and not nowhere and not (error.filename and error.errno in UNUSABLE):
            raise
        what = "written" if error.errno in FULL else "used"
        name = "the working folder, or the one of TMPDIR," if nowhere else error.filename or "the output"
        message = f"{name} cannot be {what}: {error.strerror}"
        passes = error.errno in MAY_PASS
        told = StorageError(f"{message}. Start again when it answers") if passes else TorchtrainError(message)
        _tell(told, alone=True)
        return told.exit_code
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # Python would end with a code of its own
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def door(command: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """A module's ``main``: ``run_door`` calls ``command`` with the words given, or else those of the command line."""

    def main(argv: Sequence[str] | None = None) -> int:
        return run_door(lambda: command(sys.argv[1:] if argv is None else argv))

    main.__doc__ = command.__doc__
    return main


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and end the process with the exit code that it returns, without finalizing the interpreter.

    The last line of each command. Threads of PyTorch outlive ``main``: those of a gloo group still hold the tensors of
    its last collectives, and DTensor's caches keep groups alive that have been destroyed. A thread that waits for the
    GIL when the interpreter is finalized ends by ``pthread_exit``, which must not unwind C++ destructors: the process
    would abort with signal 6 in place of its exit code (https://github.com/pytorch/pytorch/issues/38228). PyTorch has
    no function that joins these threads. So what the interpreter does before it is finalized is done here: wait for
    threads that are no daemons, call the exit handlers, flush.
    """
    code: Any
    try:
        code = main()
    except SystemExit as exit_:  # --help
        code = exit_.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as in a child of multiprocessing
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code or 0)


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
