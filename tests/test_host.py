"""Between two lines of the log the host waits for nothing: the device always has its next work queued."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

# Runs the trainer, counts by step what would wait for the device, and prints the counts as its last line.
COUNT_WAITS = """
import json, sys
from unittest.mock import patch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchtrain.datasets.loader import Loader
from torchtrain.faults.update_guard import UpdateGuard
from torchtrain.profiling import Profiler
from torchtrain.train import main

waiting_ops = {"aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select", "aten.unique_dim"}
# A rank alone has nobody to wait for, the loader neither: these count in what is excused below, too.
all_reduces, count, counts = 0, 0, []

class CountWaits(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        global all_reduces, count
        count += str(func).rsplit(".", 1)[0] in waiting_ops
        all_reduces += str(func).startswith("c10d.allreduce_")
        return func(*args, **(kwargs or {}))

def counting(function):
    def counted(*args, **kwargs):
        global count
        count += 1
        return function(*args, **kwargs)
    return counted

def end_step(self):
    global all_reduces, count
    counts.append(count + all_reduces)
    all_reduces = count = 0

def excused(function):
    def uncounted(*args, **kwargs):
        global count
        before = count
        result = function(*args, **kwargs)
        count = before
        return result
    return uncounted

with (
    patch.object(torch.Tensor, "tolist", counting(torch.Tensor.tolist)),
    patch.object(torch.Tensor, "numpy", counting(torch.Tensor.numpy)),
    patch.object(torch.Tensor, "cpu", counting(torch.Tensor.cpu)),
    # What the guard reads is of a step ago, and there by now; what the loader reads was never on the device.
    patch.object(UpdateGuard, "settle", excused(UpdateGuard.settle)),
    patch.object(Loader, "__next__", excused(Loader.__next__)),
    patch.object(Profiler, "step", end_step),
    CountWaits(),
):
    code = main(sys.argv[1:])
print(json.dumps(counts))
sys.exit(code)
"""

# The same on a GPU, where torch itself knows what waits.
REFUSE_WAITS = """
import sys
from unittest.mock import patch
import torch
from torchtrain.profiling import Profiler
from torchtrain.train import main

steps = 0

def end_step(self):
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


def run(program: str, folder: Path, *options: str) -> Any:
    return subprocess.run(
        [sys.executable, "-c", program, "--job.dump_folder", str(folder), *OPTIONS, *options],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )


def test_host_waits_only_to_log_and_to_save(tmp_path: Path) -> None:
    result = run(COUNT_WAITS, tmp_path)
    assert result.returncode == 0, result.stderr
    by_step = dict(enumerate(json.loads(result.stdout.splitlines()[-1]), start=1))
    assert by_step[10] > 0  # it does count
    assert {by_step[step] for step in range(2, 10)} == {0}


@pytest.mark.gpu
def test_cuda_sees_no_synchronization_between_logs(tmp_path: Path) -> None:
    result = run(REFUSE_WAITS, tmp_path)
    assert result.returncode == 0, result.stderr
