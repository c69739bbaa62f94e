"""Two starts of a run that are alive at once, and starts that are killed: at every file operation of a save or a start.

An operation on a network file system can wait for hours and then take effect, so the other start does its work right
before any of them.
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

from torchtrain.checkpoint.history import saved_steps, step_folder
from torchtrain.checkpoint.manifest import read_manifest, verify
from torchtrain.errors import CheckpointError, SupersededError

OPERATIONS = {"os.listdir", "os.scandir", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"}


@pytest.fixture(autouse=True)
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of saves
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Operations:
    """Calls ``before(number)`` before each file operation in ``folder``, but for those that ``before`` makes itself."""

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

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        below = event in ("os.remove", "os.rmdir") and args[1] >= 0  # in a folder that is removed as a whole
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


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if Operations.current is not None and event in OPERATIONS:
        Operations.current.heard(event, args)


sys.addaudithook(_heard)


def settle(run: Run) -> Run:
    """Wait for its save and its deletions."""
    run.manager.wait()
    if run.manager._thread is not None:
        run.manager._thread.join()
    return run


def resume(folder: Path, **options: object) -> Run:
    run = Run(folder, seed=9, **options)
    if run.manager.start.step is not None:
        run.manager.load(run.manager.start.step)
        assert run.place.row == 2 * run.manager.start.step  # what the first one had at that step
    return run


def check_all(folder: Path) -> list[int]:
    """Verify whatever has a final name; returns the steps."""
    steps = saved_steps(folder / "checkpoint")
    for step in steps:
        checkpoint = step_folder(folder / "checkpoint", step)
        verify(checkpoint, read_manifest(checkpoint).files)
    return steps


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


OPTIONS = {"keep_latest_k": 1, "async_mode": "disabled"}


@pytest.mark.parametrize("options", [OPTIONS, {"keep_latest_k": 3}], ids=["1", "3"])
def test_a_newer_start_at_any_moment_of_a_save(tmp_path: Path, options: dict[str, Any]) -> None:
    """The older one is in the save of step 6, and the deletion after it, when the newer one starts and saves more."""
    number = 0
    while True:
        folder = tmp_path / str(number)
        older = settle(Run(folder, **options).train(1, 4))
        newer: list[Run] = []

        def start(count: int, number: int = number, folder: Path = folder, newer: list[Run] = newer) -> None:
            if count == number:
                newer.append(resume(folder, **options))
                begun_at = newer[0].manager.start.step
                assert begun_at in (4, 6)
                settle(newer[0].train(begun_at + 1, begun_at + 4))

        with Operations(folder / "checkpoint", start) as operations:
            with suppress(CheckpointError):
                older.train(5, 6)
            settle(older)
        if not newer:
            break
        last = newer[0].manager._newest
        before = names(folder)
        assert last in check_all(folder), (number, before)
        with pytest.raises(SupersededError):
            older.train(7, 10)
        settle(older)
        assert names(folder) == before, number
        settle(newer[0].train(last + 1, last + 2))
        assert check_all(folder)[-1] == last + 2
        assert resume(folder, **options).manager.start.step == last + 2
        assert not [name for name in names(folder) if name.endswith((".partial", ".moving"))], number
        number = operations.count if number > operations.count else number + 1
    assert number > 15


@contextmanager
def paused_after_check(run: Run, number: int, go_on: threading.Event, paused: threading.Event) -> Iterator[None]:
    """Let ``run`` wait for ``go_on`` after it has checked its claim so many times: before what it checked it for."""
    check, counts = run.manager._check_claim, iter(range(1000))

    def checked() -> None:
        check()
        if next(counts) == number:
            paused.set()
            assert go_on.wait(60)

    run.manager._check_claim = checked  # type: ignore[method-assign]
    yield
    run.manager._check_claim = check  # type: ignore[method-assign]


@pytest.mark.parametrize("check", range(5))
def test_an_older_start_completes_a_save_at_any_moment_of_a_start(tmp_path: Path, check: int) -> None:
    """The older one has checked its claim, and hangs in the operation that follows, until the newer one has come far.

    Its checks: before it makes room, before it commits, and before and after it renames the checkpoint to delete.
    """
    number, waited = 0, True
    while waited:
        folder = tmp_path / str(number)
        older = settle(Run(folder, **OPTIONS).train(1, 4))
        go_on, paused = threading.Event(), threading.Event()

        def save(older: Run = older, paused: threading.Event = paused) -> None:
            with suppress(CheckpointError):
                settle(older.train(5, 6))
            paused.set()

        thread = threading.Thread(target=save)

        def end(count: int, number: int = number, thread: threading.Thread = thread) -> None:
            if count == number:
                go_on.set()  # noqa: B023
                thread.join()

        with paused_after_check(older, check, go_on, paused):
            thread.start()
            assert paused.wait(60)
            with Operations(folder / "checkpoint", end, threading.main_thread()) as operations:
                newer = resume(folder, **OPTIONS)
            waited = number < operations.count
            go_on.set()
            thread.join()
        begun_at = newer.manager.start.step
        assert begun_at in (4, 6)
        assert check_all(folder), number
        settle(newer.train(begun_at + 1, begun_at + 2))
        assert check_all(folder)[-1] == begun_at + 2
        with pytest.raises(SupersededError):
            older.train(7, 10)
        assert resume(folder, **OPTIONS).manager.start.step == begun_at + 2
        assert not [name for name in names(folder) if name.endswith((".partial", ".moving"))], number
        number += 3


def saves(run: Run) -> None:
    run.train(5, 6)


def saves_again(run: Run) -> None:
    """After a rollback of a part of the states, step 4, which is the only checkpoint."""
    run.manager.load(4, only=("model", "optimizer"))
    run.manager.maybe_save(4, last=True)


@pytest.mark.parametrize("work", [saves, saves_again])
def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path: Path, work: Callable[[Run], None]) -> None:
    run = settle(Run(tmp_path / "run", **OPTIONS).train(1, 4))

    def kill(count: int) -> None:
        shutil.copytree(tmp_path / "run", tmp_path / str(count))

    with Operations(tmp_path / "run/checkpoint", kill) as operations:
        work(run)
        settle(run)
    kill(operations.count)
    assert operations.count > 20
    for count in range(operations.count + 1):
        folder = tmp_path / str(count)
        check_all(folder)

        def kill_again(again: int, folder: Path = folder) -> None:
            if again % 4 == 0:
                shutil.copytree(folder, folder / f"again/{again}", ignore=shutil.ignore_patterns("again"))

        with Operations(folder / "checkpoint", kill_again):
            resumed = resume(folder, **OPTIONS)
        assert resumed.manager.start.step in (4, 6), count
        assert not [name for name in names(folder) if name.endswith((".partial", ".moving"))], count
        if count % 8 == 0:
            for again in (folder / "again").iterdir():
                assert resume(again, **OPTIONS).manager.start.step in (4, 6)


def test_an_older_start_that_lists_late_renames_nothing_of_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim is checked, it hangs in listing the folder, and the newer one saves ten checkpoints."""
    older = settle(Run(tmp_path, keep_latest_k=0).train(1, 6))
    listdir, begun = os.listdir, []

    def late(path: Any = ".") -> list[str]:
        if not begun and str(path).endswith("checkpoint") and threading.current_thread() is not threading.main_thread():
            begun.append(path)
            settle(resume(tmp_path, keep_latest_k=0).train(7, 26))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", late)
    with pytest.raises(SupersededError):
        older.train(7, 8)
    assert begun
    assert [step for step in check_all(tmp_path) if step > 6] == list(range(8, 27, 2))
    assert not list((tmp_path / "checkpoint").glob("*.superseded*"))
    assert resume(tmp_path).manager.start.step == 26


def test_a_rename_that_waited_until_a_newer_start_saved_that_name_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(Run(tmp_path).train(1, 8))
    older = Run(tmp_path, load_step=2)  # will set steps 4 to 8 aside
    older.manager.load(2)
    rename, newer = os.rename, []

    def late(source: Any, target: Any, **options: Any) -> None:
        if not newer and str(target).endswith(".moving"):
            newer.append(Run(tmp_path, load_step=2, seed=3))
            newer[0].manager.load(2)
            settle(newer[0].train(3, 8))
            newer.append(names(tmp_path))
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(SupersededError):
        older.train(3, 4)
    assert names(tmp_path) == newer[1]
    assert check_all(tmp_path) == [2, 4, 6, 8]


def test_a_commit_whose_files_were_removed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = settle(Run(tmp_path, **OPTIONS).train(1, 4))
    make_room = run.manager._retire_newer_checkpoints

    def emptied(step: int) -> None:
        make_room(step)
        for file in (tmp_path / "checkpoint").glob("step-6.*.partial/*.distcp"):
            file.unlink()

    monkeypatch.setattr(run.manager, "_retire_newer_checkpoints", emptied)
    settle(run.train(5, 6))
    assert check_all(tmp_path) == [4]


def test_what_appeared_since_the_start_is_neither_renamed_nor_counted(tmp_path: Path) -> None:
    run = settle(Run(tmp_path, **OPTIONS).train(1, 2))
    shutil.copytree(tmp_path / "checkpoint/step-2", tmp_path / "checkpoint/step-2000")
    settle(run.train(3, 4))
    assert saved_steps(tmp_path / "checkpoint") == [4, 2000]
    shutil.copytree(tmp_path / "checkpoint/step-4", tmp_path / "checkpoint/step-6")
    with pytest.raises(CheckpointError, match=r"step-6 has appeared since this run was started.*move it away"):
        run.train(5, 5).manager.maybe_save(6, last=True)
    assert saved_steps(tmp_path / "checkpoint") == [4, 6, 2000]


def test_a_start_that_is_rejected_leaves_the_running_one_alone(tmp_path: Path) -> None:
    running = settle(Run(tmp_path).train(1, 2))
    (tmp_path / "checkpoint/step-4.0123.partial").mkdir()
    before = (tmp_path / "checkpoint/generation.json").read_text()
    with pytest.raises(CheckpointError, match=r"optimizer.lr = 0.2"):
        Run(tmp_path, config_toml="[optimizer]\nlr = 0.2\n")
    assert (tmp_path / "checkpoint/generation.json").read_text() == before
    assert (tmp_path / "checkpoint/step-4.0123.partial").exists()
    settle(running.train(3, 4))
    assert check_all(tmp_path) == [2, 4]
