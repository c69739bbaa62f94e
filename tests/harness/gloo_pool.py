"""A pool of worker processes for distributed tests: torch is imported once, and each call has a new gloo group."""

import multiprocessing.connection
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from forkserver import context

TIMEOUT_SECONDS = 120
# DTensor's caches keep the groups of past calls alive, and each group has threads that wake up a hundred times a
# second. Forking a new process that has imported all modules is cheaper than the threads of a full test run.
CALLS_PER_PROCESS = 4


class GlooPool:
    """``pool.run(4, function, *args)`` calls a module-level function on 4 ranks and returns their 4 results."""

    def __init__(self, timeout_seconds: int = TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds
        self.context = context()
        self.calls = 0
        self.workers: list[tuple[Any, multiprocessing.connection.Connection]] = []
        # Of the workers' stores. A store writes to its file when its group is freed, which may be long after the call.
        self.folder = tempfile.TemporaryDirectory()

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if self.calls % CALLS_PER_PROCESS == 0:
            self._kill()
        self.calls += 1
        while len(self.workers) < ranks:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
        connections = [connection for _, connection in self.workers[:ranks]]
        try:
            return self._call(connections, function, args)
        except BaseException:  # including pytest's timeout
            self._kill()  # ranks may wait in a collective for ever, or send a result that the next call would receive
            raise

    def _call(
        self, connections: list[multiprocessing.connection.Connection], function: Callable[..., Any], args: Any
    ) -> list[Any]:
        ranks = len(connections)
        results: dict[int, Any] = {}
        store = str(Path(self.folder.name) / f"store-{self.calls}")
        for rank, connection in enumerate(connections):
            try:
                connection.send((rank, ranks, store, function, args))
            except ConnectionError:
                raise AssertionError(f"a rank died after the previous call\n{self._deaths()}") from None
        while len(results) < ranks:
            waiting = [connections[rank] for rank in range(ranks) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, timeout=self.timeout_seconds)
            error = f"no rank answered within {self.timeout_seconds} s\n" if not ready else ""
            for connection in ready:
                rank = connections.index(connection)
                try:
                    succeeded, results[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    succeeded, results[rank] = False, "the process died"
                if not succeeded:
                    error += f"rank {rank}: {results[rank]}\n"
            if error:
                raise AssertionError(error + self._deaths())
        return [results[rank] for rank in range(ranks)]

    def _deaths(self) -> str:
        """The exit codes of processes that died: other ranks may be the first to report that, as a lost connection."""
        multiprocessing.connection.wait([process.sentinel for process, _ in self.workers], timeout=0.2)
        codes = {rank: process.exitcode for rank, (process, _) in enumerate(self.workers)}
        return "".join(f"rank {rank}: exit code {code}\n" for rank, code in codes.items() if code is not None)

    def _kill(self) -> None:
        for process, connection in self.workers:
            process.kill()
            process.join()
            connection.close()
        self.workers.clear()

    def close(self) -> None:
        self._kill()
        self.folder.cleanup()


def _serve(connection: multiprocessing.connection.Connection) -> None:
    import torch
    import torch.distributed as dist

    from torchtrain.distributed.connections import gloo_backend
    from torchtrain.torch_internals import forget_meshes

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    while True:
        try:
            rank, ranks, store, function, args = connection.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                gloo_backend(),
                init_method=f"file://{store}",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=TIMEOUT_SECONDS),
            )
            result = function(*args)
            dist.barrier()
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
                forget_meshes()
