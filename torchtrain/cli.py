"""Wraps the package's commands: errors become one message and a documented exit code."""

import atexit
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from torchtrain.environment import limit_error
from torchtrain.errors import StoppedError, StorageError, TorchtrainError
from torchtrain.files import TRANSIENT_ERRNOS
from torchtrain.logging import init_logging, logger

# Errors with a cause outside of the program: of any output, and of a path that the user or the config names.
DISK_FULL_ERRNOS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
BAD_PATH_ERRNOS = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, *TRANSIENT_ERRNOS)
TURN_SECONDS = 2.0


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


def run_command(run: Callable[[], int]) -> int:
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
        if (
            error.errno not in DISK_FULL_ERRNOS
            and not nowhere
            and not (error.filename and error.errno in BAD_PATH_ERRNOS)
        ):
            raise
        what = "written" if error.errno in DISK_FULL_ERRNOS else "used"
        name = "the working folder, or the one of TMPDIR," if nowhere else error.filename or "the output"
        message = f"{name} cannot be {what}: {error.strerror}"
        passes = error.errno in TRANSIENT_ERRNOS
        told = StorageError(f"{message}. Start again when it answers") if passes else TorchtrainError(message)
        _tell(told, alone=True)
        return told.exit_code
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # Python would end with a code of its own
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def command(run: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Decorator for a module's ``main``: ``run_command`` calls it with the given arguments, or else with sys.argv's."""

    def main(argv: Sequence[str] | None = None) -> int:
        return run_command(lambda: run(sys.argv[1:] if argv is None else argv))

    main.__doc__ = run.__doc__
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
