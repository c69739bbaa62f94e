"""Wrapper of the package's commands, which turns errors into one message and a documented exit code."""

import atexit
import errno
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn, TextIO

from torchtrain import __version__
from torchtrain.environment import LOST_CONNECTION, limit_error
from torchtrain.errors import ConfigError, HangError, StoppedError, StorageError, TorchtrainError
from torchtrain.files import TRANSIENT_ERRNOS
from torchtrain.logging import init_logging, logger
from torchtrain.optional_packages import missing_package

# Errors whose cause is outside of the program: errors of any output, and of a path that the user or the config names.
DISK_FULL_ERRNOS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
BAD_PATH_ERRNOS = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, *TRANSIENT_ERRNOS)
LOG_DELAY_SECONDS = 2.0
SIGNAL_SECONDS = 2.0  # in which a signal to all ranks has reached the last of them


class Interrupted(KeyboardInterrupt):
    """A signal that ends a command as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of a signal that ends a command.

    In an import the signal ends the process, as before the command runs, because an import may hide the exception:
    pybind11 makes it an ImportError, and torch clears that of its import of NumPy, of which parts are then missing.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _log_signal(number)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        frame = frame.f_back
    raise Interrupted(number)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """A context manager in which SIGTERM and SIGUSR1, which SLURM sends, raise ``Interrupted``."""
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_first_rank() -> bool:
    """Whether this process is rank 0, the only process, or has an invalid RANK."""
    rank = os.environ.get("RANK", "0")
    return rank == "0" or not rank.isdecimal()


def reports_errors() -> bool:
    """Whether this process prints the errors that all ranks have, such as those of the config.

    Rank 0 does, and without torchrun the first rank of each node: RANK may be set in a pod in which a command is
    started alone, so that there is no rank 0.
    """
    is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0" and "TORCHELASTIC_RUN_ID" not in os.environ
    return is_first_rank() or is_first_of_node


def _log_signal(number: int) -> None:
    if reports_errors():
        logger.error("stopped by %s", "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)


def _log_once(error: TorchtrainError, *, only_this_rank: bool = False) -> None:
    """Log ``error`` once for all ranks that raise it.

    After process-group initialization all ranks raise the same TorchtrainError, and rank 0 logs it. Before, an error
    may be raised on a single rank. That rank delays the message by a time that depends on its number, because torchrun
    kills the other ranks of a node as soon as one exits, so that the first message is the only one.

    Args:
        error: the error to log.
        only_this_rank: whether ``error`` may have been raised on this rank only, even after initialization.
    """
    dist = sys.modules.get("torch.distributed")
    is_initialized = dist is not None and dist.is_initialized()
    if not (is_first_rank() if is_initialized else reports_errors()):
        # Without torch the config was rejected, by all ranks with the same message, unless a machine cannot read it.
        raised_on_all = not error.of_machine if dist is None else is_initialized
        if not (raised_on_all and only_this_rank):
            if raised_on_all or "TORCHELASTIC_RUN_ID" not in os.environ or isinstance(error, StoppedError):
                return
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            time.sleep(LOG_DELAY_SECONDS + local_rank / 8)  # less than launch.SHARED_ENDING_SECONDS
    logger.error("error: %s", error)


def _has_no_reader(stream: TextIO) -> bool:
    """Whether ``stream`` is a pipe, or a socket, that nothing reads any more."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # errors alone
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # closed, or no file
        return False


def run_command(run: Callable[[], int]) -> int:
    """Call ``run`` and return its exit code, with one message and a documented exit code for errors of the environment.

    These are a TorchtrainError, Ctrl-C, a full disk, and a path that cannot be used. If the reader of stdout has ended,
    such as ``| head``, the command ends without a message, as by SIGPIPE. Other exceptions are raised.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the encoding of the terminal may not be UTF-8
    init_logging()
    # It is the default action until here (torchtrain/__init__.py), and stays ignored in a background job of a shell.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in (
        signal.SIG_DFL,
        signal.default_int_handler,
    ):
        signal.signal(signal.SIGINT, interrupt)
    try:
        code = run()
        sys.stdout.flush()
        return code
    except TorchtrainError as error:
        if not isinstance(error, HangError):
            _log_once(error)
        elif str(error):
            _log_once(error, only_this_rank=True)
        if isinstance(error, StoppedError):
            os._exit(error.exit_code)  # a hanging thread would keep the process alive
        return error.exit_code
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Interrupted) else signal.SIGINT
        _log_signal(number)
        return 128 + number
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        if limit := limit_error(error):
            _log_once(limit, only_this_rank=True)
            return limit.exit_code
        if isinstance(error, ModuleNotFoundError):
            reported: TorchtrainError | None = missing_package(error)
            if (error.name or "").startswith("torchtrain.plugins."):
                reported = ConfigError(f"this needs {error.name}, of a plugin that is not installed")
            if reported is not None:
                _log_once(reported, only_this_rank=True)
                return reported.exit_code
        if not isinstance(error, OSError):
            if LOST_CONNECTION.search(str(error)):
                time.sleep(SIGNAL_SECONDS)  # a signal that has ended another rank reaches this one, too
            raise
        if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout):
            return 128 + signal.SIGPIPE
        no_folder = error.errno == errno.ENOENT and not error.filename  # as os.getcwd and tempfile raise it
        if (
            error.errno not in DISK_FULL_ERRNOS
            and not no_folder
            and not (error.filename and error.errno in BAD_PATH_ERRNOS)
        ):
            raise
        what = "written" if error.errno in DISK_FULL_ERRNOS else "used"
        name = "the working folder, or the one of TMPDIR," if no_folder else error.filename or "the output"
        message = f"{name} cannot be {what}: {error.strerror}"
        is_transient = error.errno in TRANSIENT_ERRNOS
        reported = (
            StorageError(f"{message}. Start again when it responds") if is_transient else TorchtrainError(message)
        )
        _log_once(reported, only_this_rank=True)
        return reported.exit_code
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # else Python's shutdown would fail to flush them, and change the exit code
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def command(run: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Decorator for the ``main`` of a command: calls it by ``run_command``, with its argument or ``sys.argv[1:]``."""

    def main(argv: Sequence[str] | None = None) -> int:
        arguments = sys.argv[1:] if argv is None else argv
        if list(arguments) == ["--version"]:
            sys.stdout.write(f"torchtrain {__version__}\n")
            return 0
        return run_command(lambda: run(arguments))

    main.__doc__ = run.__doc__
    return main


def plugin_command(module: str) -> Callable[..., int]:
    """The ``main`` of a command that ``module`` of a plugin implements: imports the module, and calls its ``main``."""

    def main(argv: Sequence[str] | None = None) -> int:
        plugin = ".".join(module.split(".")[:3])
        found: Exception
        try:
            implementation = import_module(module)
        except ModuleNotFoundError as error:
            is_own = error.name and f"{plugin}.".startswith(f"{error.name}.")
            found = ConfigError(f"this command is of the plugin {plugin}, which is not installed") if is_own else error
        else:
            code: int = implementation.main(argv)
            return code

        def reject() -> int:
            raise found

        return run_command(reject)

    return main


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and exit with the code that it returns, without finalizing the interpreter.

    This is the last line of each command. Threads of PyTorch outlive ``main``: those of a gloo group still hold the
    tensors of its last collectives, and DTensor's caches keep destroyed groups alive. A thread that waits for the GIL
    while the interpreter is finalized ends by ``pthread_exit``, which must not unwind C++ destructors: the process
    would abort with signal 6 instead of its exit code (https://github.com/pytorch/pytorch/issues/38228). PyTorch has no
    function that joins these threads. This function therefore does what the interpreter does before finalization: it
    waits for non-daemon threads, calls the exit handlers, and flushes the streams.
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
    if signal.getsignal(signal.SIGINT) in (interrupt, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the work is done: Ctrl-C ends the process without a traceback
    threading._shutdown()  # type: ignore[attr-defined]  # as in a child of multiprocessing
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a broken pipe, or a closed stream
            stream.flush()
    os._exit(code or 0)
