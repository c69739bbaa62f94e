"""Training runs in forked processes that have imported torch, so that starting and killing a run is fast.

A run calls ``main`` of ``torchtrain.train`` with a model that is small enough to be saved quickly.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forkserver import context_of, free_port

from torchtrain.config.registry import CONFIG_SECTIONS
from torchtrain.models.llama import TransformerConfig
from torchtrain.models.loss import OutputLoss

TIMEOUT_SECONDS = 90
# Its vocabulary size is that of the default tokenizer.
TINY = TransformerConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=32, vocab_size=4096, max_seq_len=32)

CONFIG = """
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
decay_type = "constant"
[training]
local_batch_size = 1
global_batch_size = 4
seq_len = 32
steps = 8
mixed_precision_param = "float32"
[metrics]
log_freq = 1
enable_tensorboard = false
[checkpoint]
interval = 2
interval_minutes = 0
keep_latest_k = 10
"""
NO_REPORT: list[str] = []  # the same for runs with another config file
if "report" in CONFIG_SECTIONS:  # this plugin is on by default, and draws curves at the end of a run
    CONFIG += "[report]\nenable = false\n"
    NO_REPORT = ["--report.no-enable"]

Hook = Callable[[], Any]  # called in each process before training; returns None or a context manager to train within


def nothing() -> None:
    return None


def train_and_exit(
    rank: int, ranks: int, port: int, argv: list[str], hook: Hook, log: Path, shape: TransformerConfig
) -> None:
    """Train as one of ``ranks``, with its output in ``log``, and end the process."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    with log.open("a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    from torchtrain.train import main

    torch.set_num_threads(1)
    changed = hook()
    with patch("torchtrain.models.model_config.flavor_config", lambda *_: shape):
        if changed is None:
            code = main(argv)
        else:
            with changed:
                code = main(argv)
    sys.stderr.flush()
    os._exit(code)


class ForkedRun:
    """``ranks`` processes that train with ``folder`` as the dump folder; their output is in ``folder/rank-N.log``."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        ranks: int = 2,
        hook: Hook = nothing,
        shape: TransformerConfig = TINY,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "test.toml"
        config.write_text(CONFIG)
        port = free_port()
        argv = [] if "--job.config_file" in options else ["--job.config_file", str(config)]
        argv += ["--job.dump_folder", str(folder), *options]
        self.logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
        self.processes = [
            context_of(options).Process(  # type: ignore[attr-defined]  # of each of them
                target=train_and_exit, args=(rank, ranks, port, argv, hook, self.logs[rank], shape), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def wait(self) -> list[int]:
        """Wait for all ranks and return their exit codes. A rank that does not end within the timeout is an error."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        alive = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        self.kill()
        assert not alive, f"ranks {alive} did not end\n{self.output()}"
        return [process.exitcode or 0 for process in self.processes]

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to ``ranks``, or to all of them."""
        for rank in ranks or range(len(self.processes)):
            if self.processes[rank].exitcode is None:
                os.kill(self.processes[rank].pid or 0, number)

    def end(self) -> None:
        """Kill the remaining processes and wait for them."""
        self.kill()
        for process in self.processes:
            process.join()

    def output(self) -> str:
        return "\n".join(log.read_text() for log in self.logs if log.exists())

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds while at least one rank is running."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.output()
            assert any(process.exitcode is None for process in self.processes), self.output()
            time.sleep(0.005)


def finish(folder: Path, *options: str, ranks: int = 2, hook: Hook = nothing, shape: TransformerConfig = TINY) -> str:
    """Train to the end, assert that all ranks exit with 0, and return their output."""
    run = ForkedRun(folder, *options, ranks=ranks, hook=hook, shape=shape)
    codes = run.wait()
    assert codes == [0] * ranks, run.output()
    return run.output()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` in a dump folder, metrics and events; an empty list if there is no such file."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def logged_losses(folder: Path) -> dict[int, float]:
    """The logged losses by step; of a step that was repeated, the last one."""
    return {line["step"]: line["loss"] for line in read_metrics(folder) if "loss" in line and "event" not in line}


def saved_tensors(folder: Path, step: int) -> dict[str, Any]:
    """All tensors of a checkpoint, unsharded."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    file = folder / f"step-{step}.pt"
    dcp_to_torch_save(folder / f"checkpoint/step-{step}", file)
    tensors: dict[str, Any] = torch.load(file, weights_only=True)
    return tensors


def same_tensors(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two checkpoints are bitwise identical."""
    return not different_tensors(ours, theirs)


def different_tensors(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The names of tensors that differ between two checkpoints, or that only one of them has."""
    import torch

    common = ours.keys() & theirs.keys()
    return sorted(
        (ours.keys() ^ theirs.keys()) | {name for name in common if not torch.equal(ours[name], theirs[name])}
    )


@contextmanager
def patched_loss(change: Callable[[int, Any], Any]) -> Any:
    """Replace the loss of each microbatch by ``change(call, loss)``; ``call`` counts from 1."""
    original, calls = OutputLoss.__call__, 0

    def changed(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return change(calls, original(*args, **options))

    with patch.object(OutputLoss, "__call__", changed):
        yield


def slow_steps() -> Any:
    """A hook that makes each microbatch sleep, so that a signal or a fault arrives during a step."""

    def sleep(_: int, loss: Any) -> Any:
        time.sleep(0.05)
        return loss

    return patched_loss(sleep)
