"""Call a function on the ranks of a new gloo group, in processes that are forked from one that has imported torch."""

import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torchtrain.config.registry import import_modules, load_plugins
from torchtrain.environment import LOST_CONNECTION
from torchtrain.errors import TorchtrainError

GRACE_SECONDS = 2.0  # for which other ranks may report an error after the first one
PRELOADED = ("torchtrain.plugins.verify_layouts.rank",)


class RankError(Exception):
    """A rank has raised an error, has died, or hangs.

    Attributes:
        where: its place in the source: that of the error, or where each rank waits.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class RankRejection(TorchtrainError):
    """A ``TorchtrainError`` of a rank, such as that of a layout which a model does not support."""


@dataclass
class _Failure:
    """The error of a rank."""

    message: str
    where: str
    is_rejection: bool
    is_consequence: bool = field(default=False)
    """Whether another rank has caused it."""


class Ranks:
    """Starts the ranks.

    Args:
        modules: modules of the user to import in each rank.
        timeout_seconds: after which ranks that have not answered hang.
    """

    def __init__(self, modules: Sequence[str], timeout_seconds: float) -> None:
        self.modules, self.timeout_seconds = tuple(modules), timeout_seconds
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOADED, *modules])
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    def call(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` of a module, on ``size`` ranks; returns their results.

        Raises:
            RankRejection: a rank has raised a TorchtrainError.
            RankError: a rank has raised another error, or has died, or hangs.
        """
        # Pickled here, because the rank must first import the modules that define the arguments.
        call = pickle.dumps((function, args))
        with tempfile.TemporaryDirectory() as folder:
            processes: list[Any] = []
            connections: list[Connection] = []
            try:
                for rank in range(size):
                    ours, theirs = self.context.Pipe()
                    process = self.context.Process(
                        target=_serve,
                        args=(theirs, rank, size, folder, self.modules, self.timeout_seconds, call),
                        daemon=True,
                    )
                    process.start()
                    theirs.close()
                    processes.append(process)
                    connections.append(ours)
                return self._results(connections, processes, Path(folder))
            finally:
                for process in processes:
                    process.kill()
                for process, connection in zip(processes, connections, strict=False):
                    process.join()
                    connection.close()

    def _results(self, connections: Sequence[Connection], processes: Sequence[Any], folder: Path) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        end = time.monotonic() + self.timeout_seconds
        while len(results) + len(failures) < len(connections):
            open_ones = [c for rank, c in enumerate(connections) if rank not in results and rank not in failures]
            ready = wait(open_ones, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = connections.index(connection)
                try:
                    answer = connection.recv()
                except (EOFError, ConnectionError):
                    answer = _Failure(_death(processes[rank], folder / f"{rank}.log"), "", is_rejection=False)
                if isinstance(answer, _Failure):
                    failures[rank] = answer
                    end = min(end, time.monotonic() + GRACE_SECONDS)
                else:
                    results[rank] = answer[0]
        if failures:
            rank, failure = min(failures.items(), key=lambda item: (item[1].is_consequence, item[0]))
            if failure.is_rejection:
                raise RankRejection(failure.message)
            raise RankError(f"rank {rank}: {failure.message}", failure.where)
        if len(results) < len(connections):
            missing = [rank for rank in range(len(connections)) if rank not in results]
            raise RankError(
                f"no result within {self.timeout_seconds:g} s: ranks wait for each other, as when they do not call the "
                "same collectives",
                _places(missing, processes, folder),
            )
        return [results[rank] for rank in range(len(connections))]


def _death(process: Any, log: Path) -> str:
    process.join(1)
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return f"the process died with exit code {process.exitcode}" + (f": {lines[-1]}" if lines else "")


def _places(ranks: Sequence[int], processes: Sequence[Any], folder: Path) -> str:
    """Where each of the ``ranks`` waits: the innermost line that is not PyTorch's."""
    for rank in ranks:
        os.kill(processes[rank].pid, signal.SIGUSR2)
    time.sleep(0.5)
    places: dict[str, list[int]] = {}
    for rank in ranks:
        log = (folder / f"{rank}.log").read_text(errors="replace")
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', log.rpartition("Current thread")[2])
        own = [(path, line, name) for path, line, name in frames if not _is_of_library(path)]
        path, line, name = own[0] if own else ("?", "?", "?")
        places.setdefault(f"{path}:{line} ({name})", []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))} at {place}" for place, ranks in places.items())


def _is_of_library(path: str) -> bool:
    """Whether a file is of PyTorch, of Python's multiprocessing, or of what observes the model here."""
    names = ("torch", "multiprocessing", "torchtrain/plugins/verify_layouts", "torchtrain/plugins/comparison")
    return any(f"/{name}/" in path for name in names) or path.startswith("<")


def _serve(
    connection: Connection,
    rank: int,
    size: int,
    folder: str,
    modules: tuple[str, ...],
    timeout_seconds: float,
    call: bytes,
) -> None:
    """Run one rank. What it writes is in a file: errors are reported by the parent, once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    log = open(f"{folder}/{rank}.log", "w")  # noqa: SIM115  # open as long as the process
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR2, file=log)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer: Any
    try:
        answer = (_run(rank, size, folder, modules, timeout_seconds, call),)
    except BaseException as error:
        answer = _failure(error)
    with suppress(OSError):
        connection.send(answer)
        wait([connection])  # until the parent has the results of all: a rank that ends closes its connections
    os._exit(0)  # threads of gloo may still run


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _run(rank: int, size: int, folder: str, modules: tuple[str, ...], timeout_seconds: float, call: bytes) -> Any:
    import torch
    import torch.distributed as dist

    from torchtrain.distributed.connections import gloo_backend

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    load_plugins()
    import_modules(modules)
    dist.init_process_group(
        gloo_backend(),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=2 * timeout_seconds),  # the parent finds a rank that hangs
    )
    function, args = pickle.loads(call)
    return function(*args)


def _failure(error: BaseException) -> _Failure:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_of_library(frame.filename)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    text = str(error).strip()
    message = text if isinstance(error, TorchtrainError) else f"{type(error).__name__}: {text.partition(chr(10))[0]}"
    is_consequence = LOST_CONNECTION.search(text) is not None
    return _Failure(message, where, isinstance(error, TorchtrainError), is_consequence)
