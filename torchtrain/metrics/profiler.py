"""Periodic torch.profiler traces and CUDA memory snapshots."""

import pickle
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from torchtrain.logging import BestEffort, logger
from torchtrain.metrics.options import ProfilingConfig

MAX_SNAPSHOT_ENTRIES = 100_000


class Profiler:
    """Writes ``folder/step-N/rank-R.*``; call ``step`` after each training step. Does nothing unless it is enabled.

    ``untimed``: context manager for the time of writing, which is not that of a training step.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        folder: Path,
        rank: int,
        device: torch.device,
        start_step: int,
        untimed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.config = config
        self.folder = folder
        self.rank = rank
        self.step_number = start_step
        self.untimed = untimed
        self.snapshots = config.enable_memory_snapshot and device.type == "cuda"
        self.profile: torch.profiler.profile | None = None
        if config.enable_memory_snapshot and not self.snapshots:
            logger.info("profiling.enable_memory_snapshot has no effect on %s: it needs CUDA", device.type)
        if config.enable_profiling:
            # The warning recommends acc_events, which would keep the events of all traces in memory.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            schedule = torch.profiler.schedule(wait=config.profile_freq - 2, warmup=1, active=1)
            self.profile = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write_trace)
        self.best_effort = BestEffort("profiling")

    def __enter__(self) -> "Profiler":
        if self.profile is not None:
            self.profile.__enter__()  # type: ignore[no-untyped-call]
        if self.snapshots:
            torch.cuda.memory._record_memory_history(max_entries=MAX_SNAPSHOT_ENTRIES)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.snapshots:
            cause = error and error.__cause__  # pipeline stages wrap errors in one of their own
            if isinstance(error, torch.OutOfMemoryError) or isinstance(cause, torch.OutOfMemoryError):
                self._write_snapshot("out-of-memory")
            torch.cuda.memory._record_memory_history(enabled=None)
        if self.profile is not None:
            self.profile.on_trace_ready = None  # the step that is being recorded is incomplete
            self.profile.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def step(self, number: int) -> None:
        """Call it after training step ``number``, which decreases after a rollback."""
        self.step_number = number
        if self.profile is not None:
            self.profile.step()
        if self.snapshots and self.step_number % self.config.profile_freq == 0:
            self._write_snapshot("memory")

    def _path(self, ending: str) -> Path:
        path = self.folder / f"step-{self.step_number}" / f"rank-{self.rank}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _write_trace(self, profile: torch.profiler.profile) -> None:
        with self.untimed(), self.best_effort:
            path = self._path("trace.json.gz")
            profile.export_chrome_trace(str(path))
            logger.info("wrote the profile of step %d to %s", self.step_number, path)

    def _write_snapshot(self, name: str) -> None:
        with self.untimed(), self.best_effort:
            path = self._path(f"{name}.pickle")
            path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
            logger.info("wrote a memory snapshot to %s; open it with https://pytorch.org/memory_viz", path)
