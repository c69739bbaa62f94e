"""Checkpoint intervals in steps and minutes: all ranks save at the same step, and saving does not change the run."""

import logging
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from forked_command import checked_command
from forked_run import NO_REPORT, different_tensors, finish, logged_losses, patched_loss, read_metrics, saved_tensors

from torchtrain.checkpoint import manager
from torchtrain.checkpoint.local_storage import saved_steps
from torchtrain.checkpoint.manager import SaveClock
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.retention import not_kept
from torchtrain.config.schema import JobConfig, JobSection, TrainingConfig
from torchtrain.datasets.options import DataConfig
from torchtrain.errors import ConfigError
from torchtrain.fault_tolerance import step_check
from torchtrain.logging import logger
from torchtrain.metrics import run_description
from torchtrain.models.model_config import flavor_config
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.optimizers.options import EMAConfig, OptimizerConfig

BY_TIME = ("--checkpoint.interval", "1000", "--checkpoint.keep_latest_k", "0", "--training.steps", "12")


def save_due_at(at: tuple[int, ...], rank: str = "1", first: Callable[[], Any] = lambda: None) -> Any:
    """A hook: ``SaveClock.pending`` is true on ``rank`` only, in the calls whose numbers are in ``at``."""
    import os

    calls = 0

    def pending(_: SaveClock) -> bool:
        nonlocal calls
        calls += 1
        return os.environ["RANK"] == rank and calls in at

    SaveClock.pending = property(pending)  # type: ignore[assignment, method-assign]
    return first()


def test_clock_of_any_rank_makes_all_ranks_save_at_the_next_step(tmp_path: Path) -> None:
    by_time, by_step, options = tmp_path / "by_time", tmp_path / "by_step", (*BY_TIME, "--training.steps", "7")
    finish(by_time, *options, hook=partial(save_due_at, (2, 4)))
    assert saved_steps(by_time / "checkpoint") == [3, 5, 7]
    finish(by_step, *options, "--checkpoint.interval_minutes", "0")
    assert saved_steps(by_step / "checkpoint") == [7]
    assert logged_losses(by_time) == logged_losses(by_step)
    assert different_tensors(saved_tensors(by_time, 7), saved_tensors(by_step, 7)) == []
    shutil.rmtree(by_time / "checkpoint/step-7")  # resume from a checkpoint that the clock triggered
    finish(by_time, *options, ranks=1, hook=partial(save_due_at, (), "0"))
    assert logged_losses(by_time) == pytest.approx(logged_losses(by_step), rel=1e-5)


def diverging() -> Any:
    """The loss is high from step 5 on."""
    return patch.object(LRSchedule, "rate", lambda _, step: 1e-3 if step <= 4 else 3.0)


def test_multiples_and_the_best_by_validation_are_kept(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("some words that nobody has trained on\n" * 20)
    options = ["--validation.enable", f"--validation.path={held_out}", "--validation.interval=2"]
    options += ["--checkpoint.keep_latest_k=1", "--checkpoint.keep_best_k=1", "--checkpoint.keep_every=6"]
    finish(tmp_path / "run", *options, "--training.steps=10", ranks=1, hook=diverging)
    lines = read_metrics(tmp_path / "run")
    losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    best = min(losses, key=losses.__getitem__)
    assert best in (2, 4)
    assert saved_steps(tmp_path / "run/checkpoint") == [best, 6, 10]
    # Another node, whose dump folder is empty, knows the losses by the checkpoints.
    options += [f"--checkpoint.folder={tmp_path}/run/checkpoint", "--checkpoint.keep_every=0", "--training.steps=14"]
    finish(tmp_path / "other", *options, "--checkpoint.interval=2", ranks=2, hook=diverging)
    assert saved_steps(tmp_path / "run/checkpoint") == [best, 14]
    assert min(line["step"] for line in read_metrics(tmp_path / "other") if "validation_loss" in line) == 10
    with pytest.raises(ConfigError, match=r"checkpoint.keep_best_k needs validations: set data.held_out"):
        JobConfig(checkpoint=CheckpointConfig(keep_best_k=2))


def test_keep_latest_k_counts_checkpoints_of_both_intervals(tmp_path: Path) -> None:
    options = (*BY_TIME, "--checkpoint.keep_latest_k", "2", "--checkpoint.interval", "5")
    finish(tmp_path, *options, ranks=1, hook=partial(save_due_at, (6, 7), "0"))
    assert saved_steps(tmp_path / "checkpoint") == [10, 12]  # of 5, 7, 8, 10, 12


def nan_in_step_4() -> Any:
    return patched_loss(lambda call, loss: loss * float("nan") if call == 4 * 4 else loss)


def test_save_that_is_due_at_a_nonfinite_step_is_made_after_the_rollback(tmp_path: Path) -> None:
    hook = partial(save_due_at, (1, 3), "0", nan_in_step_4)
    output = finish(tmp_path, *BY_TIME, "--faults.on_nonfinite", "rollback", ranks=1, hook=hook)
    assert "rolled back to" in output
    assert saved_steps(tmp_path / "checkpoint") == [1, 3, 12]


def long_steps() -> None:
    step_check.LONG_STEP_SECONDS = 0.0


def test_long_steps_are_saved_without_waiting_for_the_next_step(tmp_path: Path) -> None:
    finish(tmp_path, *BY_TIME, "--training.steps", "6", hook=partial(save_due_at, (3, 5), "1", long_steps))
    assert saved_steps(tmp_path / "checkpoint") == [3, 5, 6]


def test_interval_minutes_are_counted_from_the_end_of_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(manager, "time", SimpleNamespace(monotonic=lambda: now))
    clock, never = SaveClock(7.0), SaveClock(0)
    now += 419
    assert not clock.pending
    now += 1
    assert clock.pending
    clock.agreed = True
    clock.save_begins()
    now += 1e6
    assert (clock.pending, clock.agreed) == (False, False)
    clock.start()
    now += 419
    assert not clock.pending
    now += 1
    assert clock.pending
    assert not never.pending


def test_minimal_config_saves_and_resumes(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(
        "[model.shape]\ndim = 32\nn_layers = 1\nn_heads = 2\nn_kv_heads = 1\nffn_dim = 64\n"
        "[training]\nseq_len = 32\nlocal_batch_size = 2\nsteps = 2\n[lr_scheduler]\ntotal_steps = 50\n"
    )
    options = ("--job.config_file", str(config), "--job.dump_folder", str(tmp_path / "run"), *NO_REPORT)
    output = checked_command("torchtrain.train", *options).stderr
    assert "checkpoints  every 500 steps and 30 minutes, the newest 5 kept, " in output
    assert saved_steps(tmp_path / "run/checkpoint") == [2]
    assert "resumed from" in checked_command("torchtrain.train", *options, "--training.steps", "3").stderr


def test_disabled_checkpoints_are_logged_once_before_training(tmp_path: Path) -> None:
    output = finish(tmp_path, "--checkpoint.no-enable", "--training.steps", "1", ranks=1).splitlines()
    (row,) = [number for number, line in enumerate(output) if re.search("checkpoint(s | |[.])", line)]
    assert output[row] == "  checkpoints  off (checkpoint.enable = false): the run cannot be resumed"
    assert row < next(number for number, line in enumerate(output) if "step 1/1" in line)
    assert "checkpoint.enable = false" not in finish(tmp_path / "on", "--training.steps", "1", ranks=1)


def test_too_little_disk_space_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO)
    config = JobConfig(
        job=JobSection(dump_folder=str(tmp_path)),
        checkpoint=CheckpointConfig(keep_latest_k=3),
        ema=EMAConfig(enable=True),
    )
    for free, warns in ((400e9, True), (600e9, False)):
        caplog.clear()
        with patch.object(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free)):
            run_description.warn_about_checkpoints(config, flavor_config("llama3", "8B"), 0)
        assert ("may need 513.9 GB: make room" in caplog.text) == warns


@pytest.mark.parametrize(
    ("options", "start", "count"),
    [
        ({}, 0, 6),
        ({"keep_best_k": 2}, 0, 8),
        ({"keep_every": 300}, 0, 6 + 3),  # of 300, 600 and 900
        ({"keep_every": 300, "keep_best_k": 1}, 600, 7 + 1),  # those of 300 and 600 are on the disk
        ({"keep_latest_k": 0}, 0, 10),
        ({"keep_latest_k": 0}, 450, 6),
    ],
)
def test_checkpoints_that_the_disk_must_hold_are_those_of_all_options(
    options: dict[str, int], start: int, count: int
) -> None:
    config = JobConfig(
        checkpoint=CheckpointConfig(interval=100, **options),  # type: ignore[arg-type]
        training=TrainingConfig(steps=1000),
        data=DataConfig(held_out=0.01),
    )
    assert run_description.most_checkpoints(config, start) == count


def test_checkpoints_that_no_option_keeps() -> None:
    """The best are those of each stage of the run, and multiples of keep_every need not be those of the interval."""
    steps = [3, 6, 9, 12, 15, 18, 21]
    losses = {3: ("", 1.0), 6: ("", 3.0), 9: ("", 2.0), 12: ("anneal", 5.0), 15: ("anneal", 6.0), 30: ("", 0.5)}
    assert not_kept(CheckpointConfig(keep_latest_k=2), steps, {}) == [3, 6, 9, 12, 15]
    assert not_kept(CheckpointConfig(keep_latest_k=0, keep_every=7), steps, losses) == []
    assert not_kept(CheckpointConfig(keep_latest_k=1, keep_every=7), steps, {}) == [3, 6, 12, 18]
    assert not_kept(CheckpointConfig(keep_latest_k=1, keep_best_k=1), steps, losses) == [6, 9, 15, 18]
    assert not_kept(CheckpointConfig(keep_latest_k=1, keep_best_k=2), steps, losses) == [6, 18]
    assert not_kept(CheckpointConfig(keep_latest_k=1, keep_best_k=1), steps, {}) == [], "no loss is known"


@pytest.mark.parametrize(
    ("dtype", "ema", "size"), [("float32", False, 12), ("bfloat16", False, 8), ("bfloat16", True, 12)]
)
def test_size_of_checkpoints_depends_on_the_dtype_of_moments_and_on_averages(dtype: Any, ema: bool, size: int) -> None:
    optimizer, averages = OptimizerConfig(state_dtype=dtype), EMAConfig(enable=ema)
    size_bytes = run_description._checkpoint_size(optimizer, averages, 10**9)
    assert run_description._checkpoints(CheckpointConfig(), size_bytes).endswith(f" kept, {size} GB each")
