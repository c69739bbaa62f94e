"""Estimates of several layouts at a time, each in a process of its own."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing.connection import wait as wait_for_handles
from types import TracebackType

import torch
from tqdm import tqdm

from torchtrain.config.registry import disable_plugins, import_modules
from torchtrain.config.schema import JobConfig
from torchtrain.models.spec import DecoderConfig
from torchtrain.plugins.planner.hardware import Gpu
from torchtrain.plugins.planner.summary import Estimate, estimate


def timed_estimate(layout: JobConfig, model_config: DecoderConfig, gpu: Gpu) -> tuple[Estimate, float]:
    """Return the estimate of ``layout`` without its records, which are large, and the CPU seconds that it took."""
    began = time.process_time()
    result = replace(estimate(layout, model_config, gpu), records=())
    return result, time.process_time() - began


def _begin_worker(modules: tuple[str, ...], disabled: tuple[str, ...]) -> None:
    """Prepare a process of the pool: it ends with its parent, and knows what a user's ``modules`` register.

    ``disabled``: ``job.disable_plugins``.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait_for_handles([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    # torch.fx has a progress bar, whose lock would be a semaphore of the system, and left behind by a killed process.
    tqdm.set_lock(threading.RLock())
    disable_plugins(disabled)
    import_modules(modules)


class EstimatePool:
    """Estimates layouts of a model in ``size`` processes, but the first one in this process, as it may be the only one.

    Estimates that are under way when the context manager is left are abandoned.
    """

    def __init__(self, model_config: DecoderConfig, gpu: Gpu, size: int) -> None:
        self.size = size
        self._fixed = (model_config, gpu)
        self._executor: ProcessPoolExecutor | None = None
        self._processes: set[multiprocessing.process.BaseProcess] = set()
        self._pending: dict[Future[tuple[Estimate, float]], int] = {}
        self._is_first = True

    def __enter__(self) -> "EstimatePool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._executor is not None:
            for process in self._processes:
                process.kill()
            self._executor.shutdown(cancel_futures=True)

    @property
    def is_full(self) -> bool:
        """Whether every process has a layout to estimate."""
        return len(self._pending) >= self.size

    def submit(self, number: int, layout: JobConfig) -> None:
        """Begin to estimate ``layout``; its result will have this ``number``."""
        if self._is_first or self.size == 1:
            self._is_first = False
            future: Future[tuple[Estimate, float]] = Future()
            future.set_result(timed_estimate(layout, *self._fixed))
        else:
            future = self._submit(layout)
        self._pending[future] = number

    def _submit(self, layout: JobConfig) -> Future[tuple[Estimate, float]]:
        if self._executor is None:
            # Not by fork: this process may have threads of OpenMP, which a fork does not copy.
            context = multiprocessing.get_context("spawn")
            options = layout.job.import_, layout.job.disable_plugins
            self._executor = ProcessPoolExecutor(self.size, context, _begin_worker, options)
        # The terminal sends Ctrl-C to all processes, but it is for this one alone. Others inherit a mask that blocks
        # it; this one gets it when the mask is restored. (The constructor above has already started the process that
        # tracks resources, which would unblock SIGINT.)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        others = set(multiprocessing.active_children())
        try:
            return self._executor.submit(timed_estimate, layout, *self._fixed)
        finally:
            self._processes |= set(multiprocessing.active_children()) - others
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self) -> list[tuple[int, Estimate, float]]:
        """Wait until one of the estimates under way is ready.

        Returns:
            Number, estimate and CPU seconds of those that are ready; empty if none is under way.

        Raises:
            BrokenProcessPool: a process was killed.
        """
        ready, _ = wait(self._pending, return_when=FIRST_COMPLETED)
        return [(self._pending.pop(future), *future.result()) for future in ready]
