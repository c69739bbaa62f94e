"""Fingerprints of a step add no operations to other steps."""

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forked_run import finish
from test_host_synchronization import OPTIONS
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrain.metrics.profiler import Profiler


class Trace(TorchDispatchMode):
    """Hashes of the sequence of operations, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.counts_by_step: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))

    def end_step(self) -> None:
        self.counts_by_step.append(zlib.crc32(" ".join(self.operations).encode()))
        self.operations.clear()


@contextmanager
def trace_operations() -> Iterator[None]:
    """Trace operations by step, and print their hashes as the last line of the output."""
    trace = Trace()
    with patch.object(Profiler, "step", lambda *_: trace.end_step()), trace:
        yield
    os.write(1, f"{json.dumps(trace.counts_by_step)}\n".encode())


def test_fingerprints_add_no_operations_to_other_steps(tmp_path: Path) -> None:
    traces = []
    for folder, option in (("without", ()), ("with", ("--comparison.fingerprint_steps", "4"))):
        steps = ("--training.steps", "6", "--metrics.log_freq", "6")
        output = finish(tmp_path / folder, *OPTIONS[:-2], *steps, *option, ranks=1, hook=trace_operations)
        traces.append(json.loads(output.splitlines()[-1]))
    without, with_one = traces
    # The first step includes operations from before it.
    assert len(without) == 6
    assert [step for step in range(2, 7) if without[step - 1] != with_one[step - 1]] == [4]
