"""Runs in Weights & Biases: what is logged offline, and how a run is resumed."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gloo_pool import GlooPool
from test_metrics import CONFIG, record_steps

from torchtrain.metrics.options import MetricsConfig
from torchtrain.metrics.writers import WriterContext
from torchtrain.plugins.wandb.writer import WandbOptions, WeightsAndBiases


@pytest.mark.slow  # test_wandb_undone_steps.py logs offline, too
def test_wandb_logs_offline(gloo: GlooPool, tmp_path: Path) -> None:
    pytest.importorskip("wandb.sdk")  # this folder is a module wandb, too
    (tmp_path / "wandb_id").touch()  # empty, as after a write to a full disk
    gloo.run(1, record_offline, str(tmp_path))
    run = next((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    deadline = time.monotonic() + 30  # W&B's own process may write late
    while b"loss/average" not in (content := run.read_bytes()):
        assert time.monotonic() < deadline, content
        time.sleep(0.1)
    assert b"training.steps" in content
    assert (tmp_path / "wandb_id").read_text() in run.name


def record_offline(folder: str) -> None:
    import os
    import warnings

    os.environ["WANDB_MODE"] = "offline"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of wandb itself
        record_steps(folder, {"writers": ("wandb",), "enable_tensorboard": False}, 0, 4)


def test_resumed_run_continues_the_same_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    fake = SimpleNamespace(init=lambda **options: given.append(options), Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        WeightsAndBiases(WriterContext(MetricsConfig(), tmp_path, CONFIG, options=WandbOptions(project="mine")))
    assert given[0] == given[1]
    assert (given[0]["project"], given[0]["resume"]) == ("mine", "allow")
