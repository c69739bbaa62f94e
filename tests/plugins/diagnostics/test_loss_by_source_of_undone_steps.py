"""Losses by source leave out the steps before a rollback."""

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from forked_run import read_metrics
from gloo_pool import GlooPool
from test_metrics import recorder_in

from torchtrain.models.loss import TokenLoss
from torchtrain.plugins.diagnostics.loss_by_source import LossBySource


def record_by_source_with_a_rollback(folder: str) -> None:
    loss, unused = TokenLoss(torch.tensor(6.0), torch.tensor(2)), cast(Any, None)
    by_source = LossBySource(["samples"], unused, dist.group.WORLD, torch.device("cpu"))
    with recorder_in(folder, log_freq=4) as recorder:
        recorder.hooks.add([by_source])

        def record(step: int) -> None:
            by_source.sums = torch.tensor([[6.0], [2.0]], dtype=torch.float64)
            by_source.after_step(step, unused, loss, unused)
            recorder.record(step, loss, torch.tensor(0.5), 1e-3)

        for step in (1, 2, 3):
            record(step)
        recorder.restart(2)
        for step in (3, 4):
            record(step)


def test_steps_before_a_rollback_are_not_in_the_loss_by_source(gloo: GlooPool, tmp_path: Path) -> None:
    gloo.run(1, record_by_source_with_a_rollback, str(tmp_path))
    lines = [line for line in read_metrics(tmp_path) if "event" not in line]
    assert [(line["step"], line["source_tokens_samples"]) for line in lines] == [(1, 2), (4, 4)]
