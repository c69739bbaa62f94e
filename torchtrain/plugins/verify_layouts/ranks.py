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
CALLS_PER_PROCESS = 8
"""PyTorch's caches keep the groups of past calls alive, whose threads wake up a hundred times a second."""
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
    """Calls functions on groups of ranks. Use it as a context manager, which ends their processes.

    Processes are reused by the next call, because what PyTorch caches in the first step of a process is a third of the
    time of two steps. With modules of the user, which may keep a state of their own, each call has new processes.

    Args:
        modules: modules of the user to import in each rank.
        timeout_seconds: after which ranks that have not answered hang.
    """

    def __init__(self, modules: Sequence[str], timeout_seconds: float) -> None:
        self.modules, self.timeout_seconds = tuple(modules), timeout_seconds
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOADED, *modules])
        self.calls = 0
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        self.folder = tempfile.TemporaryDirectory()  # of stores, and of what each rank writes
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.folder.cleanup()

    def call(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` of a module, on ``size`` ranks; returns their results.

        Raises:
            RankRejection: a rank has raised a TorchtrainError.
            RankError: a rank has raised another error, or has died, or hangs.
        """
        # Pickled here, because the rank must first import the modules that define the arguments.
        call = pickle.dumps((function, args))
        folder = Path(self.folder.name)
        if self.modules or self.calls % CALLS_PER_PROCESS == 0:
            self._end()
        self.calls += 1
        try:
            while len(self.processes) < size:
                ours, theirs = self.context.Pipe()
                log = folder / f"{len(self.processes)}.log"
                process = self.context.Process(
                    target=_serve, args=(theirs, log, self.modules, self.timeout_seconds), daemon=True
                )
                process.start()
                theirs.close()
                self.processes.append(process)
                self.connections.append(ours)
            for rank in range(size):
                with suppress(ConnectionError):  # it has died, which is reported below
                    self.connections[rank].send((rank, size, folder / f"store-{self.calls}", call))
            return self._results(self.connections[:size], self.processes[:size], folder)
        except BaseException:
            self._end()  # other ranks may wait in a collective for ever
            raise

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=False):
            process.join()
            connection.close()
        self.processes.clear()
        self.connections.clear()

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


def _serve(connection: Connection, log: Path, modules: tuple[str, ...], timeout_seconds: float) -> None:
    """Run one rank of each call. What it writes is in a file: errors are reported by the parent, once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    file = open(log, "w")  # noqa: SIM115  # open as long as the process
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.register(signal.SIGUSR2, file=file)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer: Any
    with suppress(OSError, EOFError):
        while True:
            # A rank leaves its group when the parent has the results of all: that closes its connections to others.
            rank, size, store, call = connection.recv()
            try:
                answer = (_run(rank, size, store, modules, timeout_seconds, call),)
            except BaseException as error:
                answer = _failure(error)
            connection.send(answer)
    os._exit(0)  # threads of gloo may still run


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _run(rank: int, size: int, store: Path, modules: tuple[str, ...], timeout_seconds: float, call: bytes) -> Any:
    import torch
    import torch.distributed as dist

    from torchtrain.distributed.connections import gloo_backend
    from torchtrain.torch_internals import forget_meshes

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    load_plugins()
    import_modules(modules)
    if dist.is_initialized():
        dist.destroy_process_group()
        forget_meshes()
    dist.init_process_group(
        gloo_backend(),
        init_method=f"file://{store}",
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
