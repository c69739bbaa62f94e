"""The writer lease: two processes of one run at the same time, and kills, at every file operation of a save or start.

An operation on a network file system can hang for hours and then take effect. Therefore the other process does its work
directly before each file operation in turn.
"""

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_checkpoint import Run

from torchtrain.checkpoint.format import read_manifest, verify
from torchtrain.checkpoint.local_storage import LocalCheckpoint, saved_steps, step_folder
from torchtrain.distributed.connections import gloo_backend
from torchtrain.errors import CheckpointError, SupersededError

OPERATIONS = {"os.listdir", "os.scandir", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"}


@pytest.fixture(autouse=True)
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and there are hundreds of saves
    dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Operations:
    """Calls ``before(number)`` before each file operation in ``folder``, except for those of ``before`` itself."""

    current: "Operations | None" = None

    def __init__(self, folder: Path, before: Callable[[int], object], thread: threading.Thread | None = None) -> None:
        self.folder, self.before, self.thread = str(folder), before, thread
        self.count = 0
        self.inside = False

    def __enter__(self) -> "Operations":
        Operations.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Operations.current = None

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        below = event in ("os.remove", "os.rmdir") and args[1] >= 0  # made by shutil.rmtree
        if self.inside or not (below or any(str(arg).startswith(self.folder) for arg in args)):
            return
        if self.thread is not None and threading.current_thread() is not self.thread:
            return
        self.inside = True
        try:
            self.before(self.count)
        finally:
            self.inside = False
            self.count += 1


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if Operations.current is not None and event in OPERATIONS:
        Operations.current.audit(event, args)


sys.addaudithook(_audit)


def wait_for_saves(run: Run) -> Run:
    """Wait until the saves and deletions of ``run`` are done."""
    run.manager.wait()
    if run.manager._thread is not None:
        run.manager._thread.join()
    return run


def resume(folder: Path, **options: object) -> Run:
    run = Run(folder, seed=9, **options)
    if run.manager.start.step is not None:
        run.manager.load(run.manager.start.step)
        assert run.loader.row == 2 * run.manager.start.step  # the position of the first run at that step
    return run


def verify_checkpoints(folder: Path) -> list[int]:
    """Verify all complete checkpoints; return their steps."""
    steps = saved_steps(folder / "checkpoint")
    for step in steps:
        checkpoint = LocalCheckpoint(step_folder(folder / "checkpoint", step))
        verify(checkpoint, read_manifest(checkpoint).files)
    return steps


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


OPTIONS = {"keep_latest_k": 1, "async_mode": "disabled"}


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [OPTIONS, {"keep_latest_k": 3}], ids=["keep 1", "keep 3"])
def test_newer_process_takes_over_at_any_operation_of_a_save(
    tmp_path: Path, options: dict[str, Any], stride: int
) -> None:
    """The newer process starts and saves while the older one saves step 6 or deletes a checkpoint afterwards."""
    number = 0
    while True:
        folder = tmp_path / str(number)
        older = wait_for_saves(Run(folder, **options).train(1, 4))
        newer: list[Run] = []

        def start(count: int, number: int = number, folder: Path = folder, newer: list[Run] = newer) -> None:
            if count == number:
                newer.append(resume(folder, **options))
                resumed_from = newer[0].manager.start.step
                assert resumed_from in (4, 6)
                wait_for_saves(newer[0].train(resumed_from + 1, resumed_from + 4))

        with Operations(folder / "checkpoint", start) as operations:
            with suppress(CheckpointError):
                older.train(5, 6)
            wait_for_saves(older)
        if not newer:
            break
        last = newer[0].manager._newest
        before = checkpoint_names(folder)
        assert last in verify_checkpoints(folder), (number, before)
        with pytest.raises(SupersededError):
            older.train(7, 10)
        wait_for_saves(older)
        assert checkpoint_names(folder) == before, number
        wait_for_saves(newer[0].train(last + 1, last + 2))
        assert verify_checkpoints(folder)[-1] == last + 2
        assert resume(folder, **options).manager.start.step == last + 2
        assert not [name for name in checkpoint_names(folder) if name.endswith((".partial", ".moving"))], number
        number = operations.count if number > operations.count else number + stride
    assert number > 15


@contextmanager
def paused_after_check(run: Run, number: int, resume_older: threading.Event, paused: threading.Event) -> Iterator[None]:
    """Make ``run`` wait for ``resume_older`` after check ``number`` of its lease, before the next operation."""
    check, counts = run.manager._check_lease, iter(range(1000))

    def checked() -> None:
        check()
        if next(counts) == number:
            paused.set()
            assert resume_older.wait(60)

    run.manager._check_lease = checked  # type: ignore[method-assign]
    yield
    run.manager._check_lease = check  # type: ignore[method-assign]


@pytest.mark.parametrize("stride", [15, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", range(5))
def test_older_process_loses_the_lease_at_any_operation_of_a_newer_start(
    tmp_path: Path, check: int, stride: int
) -> None:
    """The older process checks its lease and hangs in the next operation, until the newer one reaches an operation.

    It checks the lease before it retires newer checkpoints, before it commits, and before and after it renames the
    checkpoint to delete.
    """
    number, waited = check, True
    while waited:
        folder = tmp_path / str(number)
        older = wait_for_saves(Run(folder, **OPTIONS).train(1, 4))
        resume_older, paused = threading.Event(), threading.Event()

        def save(older: Run = older, paused: threading.Event = paused) -> None:
            with suppress(CheckpointError):
                wait_for_saves(older.train(5, 6))
            paused.set()

        thread = threading.Thread(target=save)

        def end(count: int, number: int = number, thread: threading.Thread = thread) -> None:
            if count == number:
                resume_older.set()  # noqa: B023
                thread.join()

        with paused_after_check(older, check, resume_older, paused):
            thread.start()
            assert paused.wait(60)
            with Operations(folder / "checkpoint", end, threading.main_thread()) as operations:
                newer = resume(folder, **OPTIONS)
            waited = number < operations.count
            resume_older.set()
            thread.join()
        resumed_from = newer.manager.start.step
        assert resumed_from in (4, 6)
        assert verify_checkpoints(folder), number
        wait_for_saves(newer.train(resumed_from + 1, resumed_from + 2))
        assert verify_checkpoints(folder)[-1] == resumed_from + 2
        with pytest.raises(SupersededError):
            older.train(7, 10)
        assert resume(folder, **OPTIONS).manager.start.step == resumed_from + 2
        assert not [name for name in checkpoint_names(folder) if name.endswith((".partial", ".moving"))], number
        number += stride  # with 5, each operation comes after one of the checks


def save(run: Run) -> None:
    run.train(5, 6)


def save_after_rollback(run: Run) -> None:
    """Save step 4, the only checkpoint, again after rolling back some of the states to it."""
    run.manager.load(4, only=("model", "optimizer"))
    run.manager.maybe_save(4, last=True)


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("work", [save, save_after_rollback])
def test_kill_at_any_operation_leaves_a_valid_checkpoint(
    tmp_path: Path, work: Callable[[Run], None], stride: int
) -> None:
    run = wait_for_saves(Run(tmp_path / "run", **OPTIONS).train(1, 4))

    def kill(count: int) -> None:
        shutil.copytree(tmp_path / "run", tmp_path / str(count))

    with Operations(tmp_path / "run/checkpoint", kill) as operations:
        work(run)
        wait_for_saves(run)
    kill(operations.count)
    assert operations.count > 20
    for number, count in enumerate(range(0, operations.count + 1, stride)):
        folder = tmp_path / str(count)
        verify_checkpoints(folder)

        def kill_again(again: int, folder: Path = folder, is_killed: bool = number % 8 == 0) -> None:
            if is_killed and again % 4 == 0:
                shutil.copytree(folder, folder / f"again/{again}", ignore=shutil.ignore_patterns("again"))

        with Operations(folder / "checkpoint", kill_again):
            resumed = resume(folder, **OPTIONS)
        assert resumed.manager.start.step in (4, 6), count
        assert not [name for name in checkpoint_names(folder) if name.endswith((".partial", ".moving"))], count
        if number % 8 == 0:
            for again in (folder / "again").iterdir():
                assert resume(again, **OPTIONS).manager.start.step in (4, 6)


def test_older_process_with_a_late_listing_renames_no_newer_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older process checks its lease and hangs in listing the folder; the newer one saves ten checkpoints."""
    older = wait_for_saves(Run(tmp_path, keep_latest_k=0).train(1, 6))
    listdir, hung = os.listdir, []

    def late(path: Any = ".") -> list[str]:
        if not hung and str(path).endswith("checkpoint") and threading.current_thread() is not threading.main_thread():
            hung.append(path)
            wait_for_saves(resume(tmp_path, keep_latest_k=0).train(7, 26))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", late)
    with pytest.raises(SupersededError):
        older.train(7, 8)
    assert hung
    assert [step for step in verify_checkpoints(tmp_path) if step > 6] == list(range(8, 27, 2))
    assert not list((tmp_path / "checkpoint").glob("*.superseded*"))
    assert resume(tmp_path).manager.start.step == 26


def test_late_rename_of_a_checkpoint_of_a_newer_process_is_reverted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_saves(Run(tmp_path).train(1, 8))
    older = Run(tmp_path, load_step=2)  # will supersede steps 4 to 8
    older.manager.load(2)
    rename, newer = os.rename, []

    def late(source: Any, target: Any, **options: Any) -> None:
        if not newer and str(target).endswith(".moving"):
            newer.append(Run(tmp_path, load_step=2, seed=3))
            newer[0].manager.load(2)
            wait_for_saves(newer[0].train(3, 8))
            newer.append(checkpoint_names(tmp_path))
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(SupersededError):
        older.train(3, 4)
    assert checkpoint_names(tmp_path) == newer[1]
    assert verify_checkpoints(tmp_path) == [2, 4, 6, 8]


def test_commit_fails_if_its_files_were_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = wait_for_saves(Run(tmp_path, **OPTIONS).train(1, 4))
    retire_newer = run.manager._retire_newer_checkpoints

    def remove_files_and_retire(step: int) -> bool:
        supersedes = retire_newer(step)
        for file in (tmp_path / "checkpoint").glob("step-6.*.partial/*.distcp"):
            file.unlink()
        return supersedes

    monkeypatch.setattr(run.manager, "_retire_newer_checkpoints", remove_files_and_retire)
    wait_for_saves(run.train(5, 6))
    assert verify_checkpoints(tmp_path) == [4]


def test_checkpoints_that_appear_during_the_run_are_not_renamed_or_counted(tmp_path: Path) -> None:
    run = wait_for_saves(Run(tmp_path, **OPTIONS).train(1, 2))
    shutil.copytree(tmp_path / "checkpoint/step-2", tmp_path / "checkpoint/step-2000")
    wait_for_saves(run.train(3, 4))
    assert saved_steps(tmp_path / "checkpoint") == [4, 2000]
    shutil.copytree(tmp_path / "checkpoint/step-4", tmp_path / "checkpoint/step-6")
    with pytest.raises(CheckpointError, match=r"step-6 has appeared since this run was started.*move it away"):
        run.train(5, 5).manager.maybe_save(6, last=True)
    assert saved_steps(tmp_path / "checkpoint") == [4, 6, 2000]


def test_rejected_start_does_not_affect_the_running_process(tmp_path: Path) -> None:
    running = wait_for_saves(Run(tmp_path).train(1, 2))
    (tmp_path / "checkpoint/step-4.0123.partial").mkdir()
    before = (tmp_path / "checkpoint/generation.json").read_text()
    with pytest.raises(CheckpointError, match=r"optimizer.lr = 0.2"):
        Run(tmp_path, config_toml="[optimizer]\nlr = 0.2\n")
    assert (tmp_path / "checkpoint/generation.json").read_text() == before
    assert (tmp_path / "checkpoint/step-4.0123.partial").exists()
    wait_for_saves(running.train(3, 4))
    assert verify_checkpoints(tmp_path) == [2, 4]
