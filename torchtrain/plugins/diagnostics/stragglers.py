"""Straggler detection: find ranks that slow down all others.

In synchronous training the step time of all ranks is that of the slowest. So each rank times what it does alone: its
wait for data, and a fixed computation before the first collective of a step.
"""

import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.datasets.dataloader import Batch
from torchtrain.logging import logger
from torchtrain.metrics.hooks import Hook
from torchtrain.plugins.diagnostics.options import DiagnosticsConfig

PROBE_SIZE = {"cpu": 256, "cuda": 4096}
PROBE_PRODUCTS = 8
KINDS = ("data wait", "compute")
# A delay of less than this share of a step is not reported.
MIN_SHARE_OF_STEP = 0.05


@dataclass(eq=False)
class StragglerWatch(Hook):
    """Finds ranks that are slower than others.

    Every ``straggler_freq`` steps the times of all ranks are gathered asynchronously. In the next step, rank 0 calls
    ``report(step, "straggler", values)`` for each rank whose time exceeds ``straggler_factor`` times the median.
    """

    options: DiagnosticsConfig
    device: torch.device
    group: dist.ProcessGroup  # a gloo group of all ranks, so that its messages do not wait for a GPU
    report: Callable[[int, str, dict[str, Any]], None]
    waited_seconds: Callable[[], float]
    """How long this rank has waited for the batch of the step."""

    def __post_init__(self) -> None:
        self.hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self.hosts, socket.gethostname(), group=self.group)
        size = PROBE_SIZE[self.device.type]
        self.operand = torch.ones(size, size, device=self.device)
        self.wait_seconds = 0.0
        self.steps = 0
        self.since = time.perf_counter()
        self.pending: tuple[int, dist.Work, list[Tensor]] | None = None
        probe(self.operand)  # the first call loads kernels

    def before_step(self, step: int, batch: Batch) -> None:  # noqa: ARG002
        self.report_pending()  # the times that were gathered at the previous step
        self.wait_seconds += self.waited_seconds()
        self.steps += 1
        if step % self.options.straggler_freq:
            return
        step_seconds = (time.perf_counter() - self.since) / self.steps
        own = torch.tensor([self.wait_seconds / self.steps, probe(self.operand), step_seconds], dtype=torch.float64)
        self.wait_seconds, self.steps, self.since = 0.0, 0, time.perf_counter()
        all_ranks = [torch.empty_like(own) for _ in self.hosts]
        work = dist.all_gather(all_ranks, own, group=self.group, async_op=True)
        assert work is not None
        self.pending = (step, work, all_ranks)

    def after_last_step(self) -> None:
        self.report_pending()

    def report_pending(self) -> None:
        """Report slow ranks from the pending all-gather, if there is one."""
        if self.pending is None:
            return
        step, work, all_ranks = self.pending
        work.wait()
        self.pending = None
        if dist.get_rank() != 0:
            return
        *by_kind, steps = torch.stack(all_ranks).T.tolist()
        step_seconds = max(steps)
        for kind, times in zip(KINDS, by_kind, strict=True):
            median = statistics.median(times)
            for rank, seconds in enumerate(times):
                # The probe is a sample of the computation: if it is slow, the whole step is slow by the same factor.
                delay = seconds - median if kind == "data wait" else (seconds / median - 1) * step_seconds
                if seconds > self.options.straggler_factor * median and delay > MIN_SHARE_OF_STEP * step_seconds:
                    host = self.hosts[rank]
                    usual = f"the median of {len(times)} ranks is {median:.3f} s (steps of {step_seconds:.3f} s)"
                    logger.warning(f"rank {rank} on {host} is slow: {kind} {seconds:.3f} s, where {usual}")
                    values = {"rank": rank, "host": host, "kind": kind, "seconds": seconds, "median_seconds": median}
                    self.report(step, "straggler", values)


def probe(operand: Tensor) -> float:
    """Seconds that a few matrix products take: the fastest time, times their number."""
    fastest = float("inf")
    for _ in range(PROBE_PRODUCTS):
        start = time.perf_counter()
        operand @ operand
        if operand.device.type == "cuda":
            torch.cuda.synchronize(operand.device)
        fastest = min(fastest, time.perf_counter() - start)
    return PROBE_PRODUCTS * fastest
