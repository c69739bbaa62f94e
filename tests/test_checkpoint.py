"""Checkpoints of one process: loading restores what was saved, and never what is damaged."""

import itertools
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from logging import ERROR
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from torchtrain import files
from torchtrain.checkpoint import format as checkpoint_format
from torchtrain.checkpoint import local_storage
from torchtrain.checkpoint.format import (
    CONFIG,
    INDEX,
    FileRecord,
    VerifiedReader,
    VerifiedWriter,
    manifest_bytes,
    read_manifest,
)
from torchtrain.checkpoint.local_storage import LocalCheckpoint, LocalNewCheckpoint, LocalStorage, saved_steps
from torchtrain.checkpoint.manager import CheckpointManager
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.resume import History, find_resume_point
from torchtrain.checkpoint.saved_run import SavedRun
from torchtrain.checkpoint.states import ModelState, load_tensors, save_tensors
from torchtrain.checkpoint.storage import MANIFEST, CheckpointStorage
from torchtrain.config.schema import JobConfig, JobSection
from torchtrain.errors import CheckpointError, SupersededError
from torchtrain.logging import logger
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.options import OptimizerConfig

SOME_CONFIG = "[optimizer]\nlr = 0.1\n"


pytestmark = pytest.mark.usefixtures("process_group")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("cache", torch.zeros(3), persistent=False)


class LoaderState:
    """A state with its own tensors, like that of the data loader."""

    def __init__(self, row: int) -> None:
        self.row = row

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"row": torch.tensor(self.row)}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.row = int(state_dict["row"])


class Run:
    def __init__(
        self,
        folder: Path | CheckpointStorage,
        seed: int = 0,
        config_toml: str = "[optimizer]\nlr = 0.1\n",
        **options: object,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Tied()
        self.optimizer = build_optimizer([self.model], OptimizerConfig(lr=0.1))
        self.loader = LoaderState(seed)
        config = CheckpointConfig(enable=True, **{"interval": 2, **options})  # type: ignore[arg-type]
        states = {
            "model": ModelState([self.model]),
            "optimizer": self.optimizer,
            "data": self.loader,
        }
        storage = LocalStorage(str(folder / "checkpoint")) if isinstance(folder, Path) else folder
        start = find_resume_point(config, storage, config_toml)
        self.manager = CheckpointManager(config, storage, states, config_toml, start)

    def train(self, first: int, last: int) -> "Run":
        for step in range(first, last + 1):
            self.step(step)
        self.manager.wait()
        return self

    def step(self, step: int) -> None:
        tokens = torch.tensor([step % 7, (3 * step) % 7])
        self.model.output(self.model.norm(self.model.embedding(tokens))).square().sum().backward()
        self.manager.wait_for_copies()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loader.row += 2
        self.manager.maybe_save(step)

    def tensors(self) -> dict[str, torch.Tensor]:
        model = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        return {**model, **self.optimizer.state_dict(), "row": torch.tensor(self.loader.row)}


def assert_bitwise_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_optimizer_state_before_the_first_update_has_step_zero() -> None:
    """As in a checkpoint after steps whose updates were all skipped."""
    model = Tied()
    optimizer = build_optimizer([model], OptimizerConfig(lr=0.1))
    steps = {name: value.item() for name, value in optimizer.state_dict().items() if name.endswith(".step")}
    assert steps == {f"{name}.step": 0 for name, _ in model.named_parameters()}
    model.norm.weight.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.state_dict()["norm.weight.step"].item() == 1


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("*.distcp")
    return file


def test_resumed_run_is_bitwise_identical_to_an_uninterrupted_run(tmp_path: Path) -> None:
    straight = Run(tmp_path / "straight").train(1, 7)
    Run(tmp_path / "killed").train(1, 5)
    resumed = Run(tmp_path / "killed", seed=1)
    assert resumed.manager.start.step == 4
    resumed.manager.load(4)
    assert_bitwise_equal(resumed.train(5, 7).tensors(), straight.tensors())


def test_first_start_has_no_checkpoint_to_load(tmp_path: Path) -> None:
    assert Run(tmp_path).manager.start.step is None


def test_last_step_is_saved_off_the_interval(tmp_path: Path) -> None:
    run = Run(tmp_path).train(1, 2)
    run.manager.maybe_save(3, last=True)
    assert saved_steps(tmp_path / "checkpoint") == [2, 3]


def test_tied_parameter_is_saved_once(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 2)
    dcp_to_torch_save(tmp_path / "checkpoint/step-2", tmp_path / "all.pt")
    saved = torch.load(tmp_path / "all.pt", weights_only=True)
    names = {"embedding.weight", "norm.weight", "norm.bias"}
    entries = {f"optimizer.{name}.{entry}" for name in names for entry in ("step", "exp_avg", "exp_avg_sq")}
    assert saved.keys() == {f"model.{name}" for name in names} | entries | {"data.row"}


def test_load_step_selects_a_checkpoint(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 6)
    run = Run(tmp_path, load_step=4)
    assert run.manager.start.step == 4


def test_saved_config_is_that_of_load_step(tmp_path: Path) -> None:
    """Or of the newest checkpoint, unless its config is damaged: then that of the one before."""
    for steps, lr in ((2, "0.1"), (4, "0.2"), (6, "0.3")):
        config = f"[optimizer]\nlr = {lr}\n"
        Run(tmp_path, config_toml=config, allow_changes=("optimizer.lr",)).train(steps - 1, steps)

    def saved_lr(load_step: int) -> float | None:
        checkpoint = CheckpointConfig(load_step=load_step)
        saved = SavedRun(JobConfig(job=JobSection(dump_folder=str(tmp_path)), checkpoint=checkpoint))
        return saved.config and saved.config.optimizer.lr

    assert [saved_lr(step) for step in (-1, 2, 4, 6, 3)] == [0.3, 0.1, 0.2, 0.3, None]
    (tmp_path / "checkpoint" / "step-6" / CONFIG).write_text("damaged")
    assert [saved_lr(step) for step in (-1, 4, 6)] == [0.2, 0.2, None]


def test_missing_load_step_is_an_error_that_lists_the_saved_steps(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 4)
    with pytest.raises(CheckpointError, match=r"load_step = 3 .*does not exist \(steps in that folder: 2, 4\)"):
        Run(tmp_path, load_step=3)


def test_saving_after_load_step_supersedes_later_checkpoints(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 6)
    run = Run(tmp_path, load_step=2)
    run.manager.load(2)
    run.train(3, 4)
    assert saved_steps(tmp_path / "checkpoint") == [2, 4]
    assert (tmp_path / "checkpoint/step-6.superseded").is_dir()
    assert Run(tmp_path).manager.start.step == 4


def test_saving_after_load_step_supersedes_only_up_to_the_saved_step(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 6)
    run = Run(tmp_path, load_step=2, interval=5)
    run.manager.load(2)
    run.train(3, 10)
    assert saved_steps(tmp_path / "checkpoint") == [2, 5, 10]
    assert (tmp_path / "checkpoint/step-4.superseded").is_dir()


def damage_all(folder: Path, how: str) -> None:
    for step in folder.glob("step-*"):
        for file in list(step.iterdir()):
            if how == "truncated" and file.suffix == ".distcp":
                os.truncate(file, 100)
            elif how == "empty" or (how == "without manifest" and file.name == MANIFEST):
                file.unlink()


@pytest.mark.parametrize("how", ["truncated", "empty", "without manifest", "renamed"])
def test_run_with_only_damaged_checkpoints_does_not_start_over(tmp_path: Path, how: str) -> None:
    Run(tmp_path).train(1, 4)
    if how == "renamed":
        for step, name in ((2, "step-2.damaged"), (4, "step-4.superseded-2")):
            (tmp_path / f"checkpoint/step-{step}").rename(tmp_path / "checkpoint" / name)
    damage_all(tmp_path / "checkpoint", how)
    before = sorted((tmp_path / "checkpoint").iterdir())
    with pytest.raises(CheckpointError, match=r"none of these is a valid checkpoint.*use another job.dump_folder"):
        Run(tmp_path)
    assert sorted((tmp_path / "checkpoint").iterdir()) == before


def test_folders_with_similar_names_are_not_checkpoints(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 2)
    for name in ("step-012", "step-x", "step-4.7.partial"):
        (tmp_path / "checkpoint" / name).mkdir()
    assert saved_steps(tmp_path / "checkpoint") == [2]
    assert Run(tmp_path).manager.start.step == 2


WITH_LOAD_STEP_2 = SOME_CONFIG + "[checkpoint]\nload_step = 2\n"


def test_repeated_starts_with_load_step_resume_from_their_own_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", logger.name)
    Run(tmp_path).train(1, 8)
    for first, start in ((3, 2), (5, 4), (7, 6)):  # as a scheduler restarts a job with the same command
        run = Run(tmp_path, config_toml=WITH_LOAD_STEP_2, load_step=2)
        assert run.manager.start.step == start
        run.manager.load(start)
        run.train(first, first + 1)
        assert saved_steps(tmp_path / "checkpoint")[-1] == first + 1
    assert "checkpoint.load_step = 2: resumes from step 6" in caplog.text
    (tmp_path / "checkpoint/step-2").rename(tmp_path / "gone")  # as keep_latest_k does
    assert Run(tmp_path, config_toml=WITH_LOAD_STEP_2, load_step=2).manager.start.step == 8


def test_load_step_applies_again_after_a_run_without_it(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 2)
    with_load_step = Run(tmp_path, config_toml=WITH_LOAD_STEP_2, load_step=2)
    with_load_step.manager.load(2)
    with_load_step.train(3, 4)
    without_load_step = Run(tmp_path)
    without_load_step.manager.load(4)
    without_load_step.train(5, 6)
    assert Run(tmp_path, config_toml=WITH_LOAD_STEP_2, load_step=2).manager.start.step == 2


def test_damaged_checkpoint_after_load_step_is_skipped(tmp_path: Path) -> None:
    Run(tmp_path, config_toml=WITH_LOAD_STEP_2).train(1, 6)
    (tmp_path / "checkpoint/step-6/config.toml").unlink()
    flip_bit(only_file(tmp_path / "checkpoint/step-4"))
    (tmp_path / "checkpoint/step-2").rename(tmp_path / "checkpoint/step-3")
    with pytest.raises(CheckpointError, match=r"load_step = 3 cannot be loaded: .*the checkpoint of step 2 under"):
        Run(tmp_path, config_toml=WITH_LOAD_STEP_2, load_step=3)
    (tmp_path / "checkpoint/step-3").rename(tmp_path / "checkpoint/step-2")
    assert Run(tmp_path, config_toml=WITH_LOAD_STEP_2, load_step=2).manager.resume() == 2
    assert not (tmp_path / "checkpoint/step-4").exists()


def test_renamed_or_foreign_checkpoint_is_rejected(tmp_path: Path) -> None:
    for folder in (tmp_path / "run", tmp_path / "other"):
        run = Run(folder)
        assert run.manager.start.step is None
        run.train(1, 4)
    checkpoints = tmp_path / "run/checkpoint"
    shutil.copytree(checkpoints / "step-4", checkpoints / "step-40")
    shutil.copytree(tmp_path / "other/checkpoint/step-2", checkpoints / "step-2000")
    shutil.rmtree(checkpoints / "step-2")
    shutil.copytree(tmp_path / "other/checkpoint/step-2", checkpoints / "step-2")
    for step, problem in ((40, "is the checkpoint of step 4 under another name"), (2, "is that of another run")):
        with pytest.raises(CheckpointError, match=rf"step-{step} {problem}"):
            Run(tmp_path / "run", load_step=step)
    assert Run(tmp_path / "run").manager.resume() == 4
    assert not (checkpoints / "step-40").exists()


def test_run_id_is_kept_by_restarts_and_in_a_moved_folder(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.train(1, 2)
    again = Run(tmp_path)
    again.train(3, 4)
    runs = {read_manifest(LocalCheckpoint(tmp_path / f"checkpoint/step-{step}")).run for step in (2, 4)}
    assert len(runs) == 1
    (tmp_path / "checkpoint/generation.json").unlink()
    (tmp_path / "checkpoint").rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "moved").rename(tmp_path / "elsewhere/checkpoint")
    moved = Run(tmp_path / "elsewhere")
    assert moved.manager.start.step == 4
    moved.train(5, 6)
    assert {read_manifest(LocalCheckpoint(tmp_path / "elsewhere/checkpoint/step-6")).run} == runs


def test_checkpoints_that_vanish_during_a_start_are_an_error(tmp_path: Path) -> None:
    """The weights of a run that resumes are not initialized before they are loaded."""
    Run(tmp_path).train(1, 2)
    again = Run(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="checkpoint had step-2 a moment ago, and is empty now"):
        again.manager.resume()


def test_rollback_loads_only_checkpoints_of_the_current_branch(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 8)
    run = Run(tmp_path, load_step=4, interval=3)
    assert run.manager.start.step == 4
    run.manager.load(4)
    assert run.manager.roll_back(8, ("model", "optimizer")) == 4  # not 6, which was saved before the run went back to 4
    run.train(5, 6)
    assert run.manager.roll_back(8, ("model", "optimizer")) == 6
    assert run.manager.roll_back(6, ("model", "optimizer")) == 4
    assert run.manager.roll_back(1, ("model", "optimizer")) is None


def wait_for_deletion(run: Run) -> Run:
    assert run.manager._thread is not None
    run.manager._thread.join()
    return run


def test_checkpoint_that_a_user_puts_back_is_not_deleted(tmp_path: Path) -> None:
    """Neither one that retention has deleted, nor a copy in the place of one that this start has saved."""
    folder, backup = tmp_path / "checkpoint", tmp_path / "backup"
    run = Run(tmp_path, keep_latest_k=2).train(1, 4)
    for step in (2, 4):
        shutil.copytree(folder / f"step-{step}", backup / f"step-{step}")
    wait_for_deletion(run.train(5, 8))
    assert saved_steps(folder) == [6, 8]
    (backup / "step-2").rename(folder / "step-2")
    shutil.copytree(folder / "step-6", backup / "step-6")
    shutil.rmtree(folder / "step-6")
    (backup / "step-6").rename(folder / "step-6")
    wait_for_deletion(run.train(9, 14))
    assert saved_steps(folder) == [2, 6, 12, 14]


def test_note_in_a_checkpoint_does_not_keep_it(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_latest_k=1).train(1, 2)
    (tmp_path / "checkpoint/step-2/note.txt").write_text("the good one")
    wait_for_deletion(run.train(3, 4))
    assert saved_steps(tmp_path / "checkpoint") == [4]


def test_start_owns_the_checkpoints_that_it_finds(tmp_path: Path) -> None:
    wait_for_deletion(Run(tmp_path, keep_latest_k=2).train(1, 4))
    wait_for_deletion(Run(tmp_path, keep_latest_k=2).train(5, 6))
    assert saved_steps(tmp_path / "checkpoint") == [4, 6]


def test_keep_latest_k_counts_only_complete_checkpoints(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_latest_k=2).train(1, 4)
    (tmp_path / "checkpoint/step-5").mkdir()
    (tmp_path / "checkpoint/step-3.partial").mkdir()
    run.train(6, 6).manager.close()
    assert [step for step in saved_steps(tmp_path / "checkpoint") if step != 5] == [4, 6]


def test_config_change_that_changes_the_run_is_an_error_unless_allowed(tmp_path: Path) -> None:
    Run(tmp_path, config_toml="[optimizer]\nlr = 0.1\n").train(1, 2)
    with pytest.raises(CheckpointError, match=r"optimizer.lr = 0.2 \(checkpoint: 0.1\)"):
        Run(tmp_path, config_toml="[optimizer]\nlr = 0.2\n")
    allowed = Run(tmp_path, config_toml="[optimizer]\nlr = 0.2\n", allow_changes=("optimizer.lr",))
    assert allowed.manager.start.step == 2


def test_only_the_newest_lease_holder_saves(tmp_path: Path) -> None:
    older = Run(tmp_path)
    assert older.manager.start.step is None
    older.train(1, 2)
    newer = Run(tmp_path, seed=1)
    assert newer.manager.start.step == 2
    newer.manager.load(2)
    newer.train(3, 6)
    manifest = (tmp_path / "checkpoint/step-6" / MANIFEST).read_text()
    # The error is immediate: fewer saves have failed than max_failed_saves allows.
    with pytest.raises(SupersededError, match=r"generation 2 of this run, on .* now saves to .* generation 1, stops"):
        older.train(3, 4)
    assert sorted(path.name for path in (tmp_path / "checkpoint").glob("step-[0-9]")) == ["step-2", "step-4", "step-6"]
    assert not list((tmp_path / "checkpoint").glob("*.superseded"))
    assert (tmp_path / "checkpoint/step-6" / MANIFEST).read_text() == manifest


def test_start_without_the_lease_selects_again_what_it_resumes_from(tmp_path: Path) -> None:
    """Meanwhile another start has trained, and deleted what it had found."""
    writer = Run(tmp_path, keep_latest_k=1).train(1, 2)
    late = Run(tmp_path, seed=1)
    manager, storage = late.manager, late.manager.storage
    select = partial(find_resume_point, manager.config, storage, "[optimizer]\nlr = 0.1\n")
    manager.begin_from(select(takes_lease=False, group=manager.group))
    assert (manager.start.step, manager.lease.id) == (2, "")
    writer.manager.lease = storage.read_lease()
    writer.train(3, 6)
    writer.manager.close()
    assert storage.steps() == [6]
    manager.begin_from(select(group=manager.group))
    assert (manager.start.step, manager.lease) == (6, storage.read_lease())
    assert (manager.resume(), manager.loaded) == (6, str(storage.open(6)))
    assert_bitwise_equal(late.tensors(), writer.tensors())


@pytest.mark.parametrize("saves", [(1, 4, 7, 10, 13), (2, 3)], ids=["five times", "after the choice"])
def test_start_without_the_lease_reads_checkpoints_that_another_one_replaces(
    saves: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before some looks at all checkpoints, or at one, the next one is saved, and the last one deleted."""
    writer = Run(tmp_path, keep_latest_k=1).train(1, 2)
    manager, looks = writer.manager, itertools.count()

    def saving(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(looks) in saves:
                (last,) = saved_steps(tmp_path / "checkpoint")
                writer.train(last + 1, last + 2)
            return function(*arguments)

        return call

    storage = LocalStorage(str(tmp_path / "checkpoint"))
    monkeypatch.setattr(storage, "versions", saving(storage.versions))
    monkeypatch.setattr(History, "check_intact", saving(History.check_intact))
    start = find_resume_point(manager.config, storage, "[optimizer]\nlr = 0.1\n", takes_lease=False)
    assert start.step == 2 * (1 if saves[0] == 2 else 1 + len(saves))
    manager.close()


def test_start_without_the_lease_renames_no_damaged_checkpoint(tmp_path: Path) -> None:
    Run(tmp_path, keep_latest_k=2).train(1, 4).manager.close()
    next((tmp_path / "checkpoint/step-4").glob("*.distcp")).write_bytes(b"")
    late = Run(tmp_path, seed=1)
    late.manager.begin_from(
        find_resume_point(late.manager.config, late.manager.storage, "[optimizer]\nlr = 0.1\n", takes_lease=False)
    )
    assert late.manager.resume() == 2
    assert late.manager.storage.steps() == [2, 4]


@pytest.mark.parametrize("at", ["before the files", "before the commit"])
def test_superseded_start_says_so_when_its_files_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    older = Run(tmp_path).train(1, 2)
    method = "create" if at == "before the files" else "commit"
    original = getattr(LocalNewCheckpoint, method)

    def late(staged: LocalNewCheckpoint, *arguments: Any) -> Any:
        monkeypatch.setattr(LocalNewCheckpoint, method, original)
        Run(tmp_path)  # acquires the lease, and removes what the older start was writing
        return original(staged, *arguments)

    monkeypatch.setattr(LocalNewCheckpoint, method, late)
    with pytest.raises(SupersededError, match=r"generation 2 of this run, on .* now saves to .* generation 1, stops"):
        older.train(3, 4)


def test_of_two_simultaneous_starts_the_older_keeps_the_checkpoint_of_the_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Run(tmp_path)
    (tmp_path / "checkpoint/generation.json").unlink()  # so that both acquire the same lease number
    newest = Run(tmp_path)
    assert older.manager.lease.generation == newest.manager.lease.generation
    retire = CheckpointManager._retire_newer_checkpoints

    def retire_late(manager: CheckpointManager, step: int) -> bool:
        if manager is newest.manager:  # its files are written; the older run now saves the same step
            with pytest.raises(SupersededError):
                older.train(1, 2)
        return retire(manager, step)

    monkeypatch.setattr(CheckpointManager, "_retire_newer_checkpoints", retire_late)
    newest.train(1, 2)
    assert saved_steps(tmp_path / "checkpoint") == [2]
    assert Run(tmp_path).manager.start.step == 2


def test_leftover_partial_folder_is_removed_and_not_loaded(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 2)
    partial = tmp_path / "checkpoint/step-4.partial"
    partial.mkdir()
    assert Run(tmp_path).manager.start.step == 2
    assert not partial.exists()


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        ("flip", "data"),
        ("truncate", "data"),
        ("flip", "index.json"),
        ("remove", "config.toml"),
        ("flip", MANIFEST),
        *(pytest.param(damage, "index.json", marks=pytest.mark.slow) for damage in ("truncate", "remove")),
        *(pytest.param(damage, "config.toml", marks=pytest.mark.slow) for damage in ("flip", "truncate")),
        *(pytest.param(damage, MANIFEST, marks=pytest.mark.slow) for damage in ("truncate", "remove")),
        pytest.param("remove", "data", marks=pytest.mark.slow),
    ],
)
def test_damaged_checkpoint_is_renamed_and_the_previous_one_is_loaded(tmp_path: Path, name: str, damage: str) -> None:
    Run(tmp_path).train(1, 4)
    folder = tmp_path / "checkpoint/step-4"
    file = only_file(folder) if name == "data" else folder / name
    if damage == "flip":
        flip_bit(file)
    elif damage == "truncate":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"load_step = 4 cannot be loaded.*" + file.name):
        Run(tmp_path, load_step=4).manager.resume()
    assert (tmp_path / "checkpoint/step-4").is_dir()
    resumed = Run(tmp_path, seed=1)
    assert resumed.manager.resume() == 2
    assert_bitwise_equal(resumed.tensors(), Run(tmp_path / "straight").train(1, 2).tensors())
    assert (tmp_path / "checkpoint/step-4.damaged").is_dir()


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def replace_small_file(folder: Path, name: str, content: bytes) -> None:
    """Replace a file and make the manifest agree, as an attacker could."""
    (folder / name).write_bytes(content)
    before = read_manifest(LocalCheckpoint(folder))
    records = [record for record in before.files if record.name != name]
    own = FileRecord(name, len(content), xxhash.xxh3_128_hexdigest(content))
    (folder / MANIFEST).write_bytes(manifest_bytes(replace(before, files=[*records, own])))


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the entries of the index by name, and make the manifest agree."""
    content = json.loads((folder / INDEX).read_bytes())
    change(content["tensors"])
    replace_small_file(folder, INDEX, json.dumps(content).encode())


def test_metadata_of_pytorch_are_not_read(tmp_path: Path) -> None:
    """They are a pickle, which is only written, for PyTorch's tools."""
    Run(tmp_path).train(1, 2)
    folder = tmp_path / "checkpoint/step-2"
    content = pickle.dumps(Metadata({}, planner_data=Malicious(tmp_path / "owned")))
    replace_small_file(folder, ".metadata", content)
    Run(tmp_path).manager.load(2)
    assert not (tmp_path / "owned").exists()


def test_file_outside_of_the_checkpoint_is_not_read(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        for entry in tensors.values():
            for chunk in entry["chunks"]:
                chunk[2] = "../../secret"

    Run(tmp_path).train(1, 2)
    change_index(tmp_path / "checkpoint/step-2", change)
    with pytest.raises(CheckpointError, match=r"names '../../secret', which the manifest does not"):
        Run(tmp_path).manager.load(2)


def test_tensors_of_all_layouts_and_dtypes_are_loaded(tmp_path: Path) -> None:
    wide = torch.randn(5, 30)
    tensors = {
        "transposed": torch.randn(3, 7).T,
        "slice": wide[1:4, 2:29:3],
        "expanded": torch.randn(4, 1).expand(4, 6),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "bool": torch.tensor([True, False, True]),
        "bfloat16": torch.randn(9).bfloat16(),
        "float64": torch.randn(2, 2, 2, dtype=torch.float64),
        "large": torch.randn(1000, 1000),
    }
    staged = LocalNewCheckpoint(tmp_path / "step-1")
    save_tensors(tensors, tensors.__getitem__, VerifiedWriter(staged, ""), staged.location)
    loaded = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    load_tensors(loaded, VerifiedReader(LocalCheckpoint(tmp_path / "step-1")))
    assert_bitwise_equal(loaded, tensors)


def test_parameter_missing_from_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 2)
    run = Run(tmp_path)
    run.model.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"Missing key in checkpoint state_dict: model.extra"):
        run.manager.load(2)


def test_loading_does_not_gather_the_metadata_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather, gathered = dist.all_gather_object, []

    def record(object_list: list[object], obj: object, group: dist.ProcessGroup) -> None:
        gathered.append(obj)
        gather(object_list, obj, group)

    Run(tmp_path).train(1, 2)
    run = Run(tmp_path)
    monkeypatch.setattr(dist, "all_gather_object", record)
    run.manager.load(2)
    assert gathered
    # Otherwise each rank would hold the metadata of all ranks.
    assert [sent for sent in gathered if isinstance(sent, Metadata)] == []


def test_incomplete_parameter_is_an_error(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 2)
    change_index(
        tmp_path / "checkpoint/step-2", lambda tensors: tensors["model.norm.weight"]["chunks"][0].__setitem__(1, [3])
    )
    with pytest.raises(CheckpointError, match=r"does not hold all of these tensors: model.norm.weight"):
        Run(tmp_path).manager.load(2)


def test_manifest_lists_all_files(tmp_path: Path) -> None:
    Run(tmp_path).train(1, 2)
    folder = tmp_path / "checkpoint/step-2"
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST}
    assert {file["name"]: file["size_bytes"] for file in json.loads((folder / MANIFEST).read_text())["files"]} == files
    assert "config.toml" in files


def test_checkpoint_is_renamed_after_all_its_files_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush, flushed = os.fsync, []
    retire, files_at_rename = CheckpointManager._retire_newer_checkpoints, []

    def recorded_fsync(descriptor: int) -> None:
        flush(descriptor)
        status = os.fstat(descriptor)
        flushed.append((status.st_ino, status.st_size))

    def recorded_retire(manager: CheckpointManager, step: int) -> bool:
        supersedes = retire(manager, step)
        (partial,) = manager.storage.folder.glob("step-2.*")
        for path in (partial, *partial.iterdir()):
            assert (path.stat().st_ino, path.stat().st_size) in flushed, path
            files_at_rename.append(path.name)
        flushed.clear()
        return supersedes

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(CheckpointManager, "_retire_newer_checkpoints", recorded_retire)
    Run(tmp_path).train(1, 2)
    assert {path.name for path in (tmp_path / "checkpoint/step-2").iterdir()} < set(files_at_rename)
    folder = (tmp_path / "checkpoint").stat()
    assert flushed == [(folder.st_ino, folder.st_size)]


def test_files_larger_than_a_block_are_hashed_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_format, "BLOCK_BYTES", 7)
    monkeypatch.setattr(local_storage, "BLOCK_BYTES", 7)
    monkeypatch.setattr(files, "BLOCK_BYTES", 7)
    run = Run(tmp_path).train(1, 2)
    resumed = Run(tmp_path, seed=1)
    assert resumed.manager.start.step == 2
    resumed.manager.load(2)
    assert_bitwise_equal(resumed.tensors(), run.tensors())


def no_space(_descriptor: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_run_continues_after_failed_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, async_mode: str
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    run = Run(tmp_path, async_mode=async_mode).train(1, 2)
    monkeypatch.setattr(os, "fsync", no_space)
    run.train(3, 6)
    monkeypatch.undo()
    assert saved_steps(tmp_path / "checkpoint") == [2]
    assert [message for name, level, message in caplog.record_tuples if name == logger.name and level == ERROR] == [
        f"{tmp_path}/checkpoint/step-{step} could not be written: OSError(28, 'No space left on device') (rank 0); "
        "the last valid checkpoint is kept"
        for step in (4, 6)
    ]
    run.train(7, 8)
    assert saved_steps(tmp_path / "checkpoint") == [2, 8]
    assert Run(tmp_path).manager.start.step == 8


def test_too_many_consecutive_failed_saves_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, max_failed_saves=2).train(1, 2)
    monkeypatch.setattr(os, "fsync", no_space)
    run.train(3, 4)
    monkeypatch.undo()
    run.train(5, 6)
    monkeypatch.setattr(os, "fsync", no_space)
    run.train(7, 8)
    with pytest.raises(CheckpointError, match=r"2 failed saves in a row, and checkpoint.max_failed_saves = 2"):
        run.train(9, 10)


def test_lease_that_cannot_be_taken_counts_as_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a replica that leads since another one has died."""
    run = Run(tmp_path, max_failed_saves=2).train(1, 2)
    run.manager.lease = replace(run.manager.lease, id="")
    monkeypatch.setattr(local_storage, "atomic_write", no_space)
    assert not run.manager.try_to_take_lease(4)
    with pytest.raises(CheckpointError, match=r"2 failed saves in a row, and checkpoint.max_failed_saves = 2"):
        run.manager.try_to_take_lease(6)
    monkeypatch.undo()
    assert run.manager.try_to_take_lease(8)
    run.train(7, 8)
    assert saved_steps(tmp_path / "checkpoint") == [2, 8]


def test_failed_last_save_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(CheckpointError, match=r"step-1 could not be written"):
        run.manager.maybe_save(1, last=True)


def test_async_save_stores_the_state_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    prepare = VerifiedWriter.prepare_global_plan

    def prepare_after_release(writer: VerifiedWriter, plans: list[SavePlan]) -> list[SavePlan]:
        assert released.wait(20)
        return prepare(writer, plans)

    monkeypatch.setattr(VerifiedWriter, "prepare_global_plan", prepare_after_release)
    run = Run(tmp_path, async_mode="async", interval=3)
    for step in range(1, 6):
        run.step(step)
        if step == 3:
            at_save = {name: tensor.clone() for name, tensor in run.tensors().items()}
    assert saved_steps(tmp_path / "checkpoint") == []
    released.set()
    run.manager.close()
    loaded = Run(tmp_path, seed=1)
    loaded.manager.load(3)
    assert_bitwise_equal(loaded.tensors(), at_save)


def test_files_on_another_node_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = VerifiedWriter.finish

    def finish_without_a_file(writer: VerifiedWriter, metadata: Metadata, results: Any) -> None:
        next(writer.new.partial.glob("*.distcp")).unlink()
        finish(writer, metadata, results)

    monkeypatch.setattr(VerifiedWriter, "finish", finish_without_a_file)
    with pytest.raises(CheckpointError, match="is not seen by this one: the dump folder must lie on a file system"):
        Run(tmp_path).manager.maybe_save(1, last=True)
    assert saved_steps(tmp_path / "checkpoint") == []


def test_save_after_a_rollback_keeps_the_position_in_the_data(tmp_path: Path) -> None:
    run = Run(tmp_path).train(1, 3)
    run.manager.load(2, only=("model", "optimizer"))
    run.manager.maybe_save(2, last=True)  # as when a stop is requested right after the rollback
    resumed = Run(tmp_path, seed=1)
    resumed.manager.load(2)
    assert resumed.loader.row == run.loader.row == 6


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_in_a_load_or_save_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Run(tmp_path).train(1, 2)
    monkeypatch.setattr(checkpoint_format.VerifiedReader, "read_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path).manager.load(2)
    monkeypatch.setattr(VerifiedWriter, "write_data", interrupt)
    tensors = {"a": torch.ones(2)}
    with pytest.raises(KeyboardInterrupt):
        save_tensors(tensors, tensors.__getitem__, VerifiedWriter(LocalNewCheckpoint(tmp_path / "b"), ""), "b")
