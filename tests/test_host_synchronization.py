"""The host does not synchronize with the device between two log lines, so that the device always has queued work."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from forked_run import finish
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrain.datasets.dataloader import DataLoader
from torchtrain.fault_tolerance.step_check import StepCheck
from torchtrain.metrics.profiler import Profiler

ROOT = Path(__file__).parent.parent

# Operations that wait for the device. All-reduces are counted, too, also in the guard and the loader: on one rank
# they wait for nobody.
WAITING_OPS = {"aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select", "aten.unique_dim"}


class CountWaits(TorchDispatchMode):
    """Counts device synchronizations and all-reduces by step."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.all_reduces = 0
        self.counts_by_step: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += str(func).rsplit(".", 1)[0] in WAITING_OPS
        self.all_reduces += str(func).startswith("c10d.allreduce_")
        return func(*args, **(kwargs or {}))

    def counting(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.waits += 1
            return function(*args, **kwargs)

        return counted

    def without_counting(self, function: Any) -> Any:
        def uncounted(*args: Any, **kwargs: Any) -> Any:
            before = self.waits
            result = function(*args, **kwargs)
            self.waits = before
            return result

        return uncounted

    def end_step(self) -> None:
        self.counts_by_step.append(self.waits + self.all_reduces)
        self.waits = self.all_reduces = 0


@contextmanager
def count_waits() -> Iterator[None]:
    """Count synchronizations of the trainer by step, and print the counts as the last line of the output."""
    counts = CountWaits()
    with (
        patch.object(torch.Tensor, "tolist", counts.counting(torch.Tensor.tolist)),
        patch.object(torch.Tensor, "numpy", counts.counting(torch.Tensor.numpy)),
        patch.object(torch.Tensor, "cpu", counts.counting(torch.Tensor.cpu)),
        # The check reads the ready result of the previous step; what the loader reads was never on the device.
        patch.object(StepCheck, "wait", counts.without_counting(StepCheck.wait)),
        patch.object(DataLoader, "__next__", counts.without_counting(DataLoader.__next__)),
        patch.object(Profiler, "step", lambda *_: counts.end_step()),
        counts,
    ):
        yield
    os.write(1, f"{json.dumps(counts.counts_by_step)}\n".encode())


# On a GPU, torch itself detects synchronizations.
REJECT_SYNCHRONIZATION = """
import sys
import zlib
from unittest.mock import patch
import torch
from torchtrain.metrics.profiler import Profiler
from torchtrain.train import main

steps = 0

def end_step(self, number):
    global steps
    steps += 1
    torch.cuda.set_sync_debug_mode("error" if 3 <= steps < 9 else "default")

with patch.object(Profiler, "step", end_step):
    sys.exit(main(sys.argv[1:]))
"""

OPTIONS = [
    *("--training.steps=12", "--training.seq_len=32", "--training.local_batch_size=2"),
    *("--training.global_batch_size=4", "--metrics.log_freq=10", "--metrics.no-enable_tensorboard"),
    *("--checkpoint.enable", "--checkpoint.interval=10"),
]


def test_host_synchronizes_only_to_log_and_to_save(tmp_path: Path) -> None:
    output = finish(tmp_path, *OPTIONS, ranks=1, hook=count_waits)
    by_step = dict(enumerate(json.loads(output.splitlines()[-1]), start=1))
    assert by_step[10] > 0  # synchronizations are counted
    assert {by_step[step] for step in range(2, 10)} == {0}


@pytest.mark.gpu
def test_cuda_detects_no_synchronization_between_logs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", REJECT_SYNCHRONIZATION, "--job.dump_folder", str(tmp_path), *OPTIONS]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
