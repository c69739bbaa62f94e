"""Copies of metrics, TensorBoard's files and the report beside checkpoints in a bucket, after each save."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from forked_run import ForkedRun, finish
from s3_server import S3Server

from torchtrain.checkpoint.manager import CheckpointManager
from torchtrain.errors import StorageError
from torchtrain.logging import logger
from torchtrain.plugins.object_storage.outputs import BucketCopies
from torchtrain.plugins.object_storage.storage import ObjectStorage

OPTIONS = (
    "--training.steps",
    "4",
    "--metrics.enable_tensorboard",
    "--report.enable",
    "--checkpoint.async_mode",
    "async",
)


@pytest.fixture(autouse=True)
def bucket(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for key, value in s3_server.environment.items():
        monkeypatch.setenv(key, value)
    return s3_server.make_bucket(f"copies-{abs(hash(tmp_path)) % 10**8}")


def use_s3(environment: dict[str, str]) -> None:
    """A hook that lets a run use the server."""
    os.environ.update(environment)


def die_before_second_save(environment: dict[str, str]) -> Any:
    """As ``use_s3``, and rank 0 dies before the second save, when the copies after the first one are stored."""
    os.environ.update(environment)
    update, maybe_save, copied = BucketCopies.update, CheckpointManager.maybe_save, threading.Event()

    def update_and_tell(self: BucketCopies, step: int) -> None:
        update(self, step)
        copied.set()

    def save_or_die(self: CheckpointManager, step: int, *args: Any) -> None:
        if step == 4:
            copied.wait(60)
            os._exit(9)
        maybe_save(self, step, *args)

    stack = ExitStack()
    stack.enter_context(patch.object(BucketCopies, "update", update_and_tell))
    stack.enter_context(patch.object(CheckpointManager, "maybe_save", save_or_die))
    return stack


def losses_by_step(metrics: bytes) -> dict[int, float]:
    lines = map(json.loads, metrics.splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def curve_of(url: str, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The loss by step, as TensorBoard reads it from a bucket."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("S3_ENDPOINT", server.url)
    accumulator = EventAccumulator(url)
    accumulator.Reload()
    return {event.step: event.value for event in accumulator.Scalars("loss/average")}


def test_killed_run_leaves_its_metrics_and_report_and_continues_them(
    s3_server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*OPTIONS, "--checkpoint.folder", f"s3://{bucket}/run/checkpoint")
    logdir = f"s3://{bucket}/run/checkpoint/outputs/tensorboard"
    hook = partial(die_before_second_save, s3_server.environment)
    killed = ForkedRun(tmp_path / "killed", *options, hook=hook, ranks=1)
    copies = partial(s3_server.objects, bucket, "run/checkpoint/outputs/")
    killed.processes[0].join(60)
    killed.end()
    assert ObjectStorage(f"s3://{bucket}/run/checkpoint").steps() == [2]
    first = copies()
    assert {"config.toml", "metrics.jsonl", "report.md", "curves.png"} <= first.keys()
    assert {1, 2} <= losses_by_step(first["metrics.jsonl"]).keys()
    report = first["report.md"].decode()
    assert "![Curves of the run](curves.png)" in report
    assert "the last one step-2" in report
    assert first["curves.png"].startswith(b"\x89PNG")
    assert {1, 2} <= curve_of(logdir, s3_server, monkeypatch).keys()

    # On another machine, which shares nothing with the first.
    finish(tmp_path / "empty", *options, hook=partial(use_s3, s3_server.environment), ranks=1)
    last = copies()
    local = {name: (tmp_path / "empty" / name).read_bytes() for name in last}
    assert {name for name in last if last[name] != local[name]} == set()
    assert len([name for name in last if name.startswith("tensorboard/")]) == 2  # one for each start
    losses = losses_by_step(last["metrics.jsonl"])
    assert list(losses) == [1, 2, 3, 4]
    assert {step: losses[step] for step in (1, 2)} == {
        step: loss for step, loss in losses_by_step(first["metrics.jsonl"]).items() if step <= 2
    }
    assert curve_of(logdir, s3_server, monkeypatch) == pytest.approx(losses)
    assert "2 starts" in last["report.md"].decode()
    assert "the last one step-4" in last["report.md"].decode()


def fail_to_store(environment: dict[str, str]) -> Any:
    os.environ.update(environment)

    def fail(*_: object) -> None:
        raise StorageError("the store does not respond")

    return patch.object(ObjectStorage, "store_output", fail)


@pytest.mark.slow
def test_copies_that_fail_warn_once_and_training_continues(s3_server: S3Server, bucket: str, tmp_path: Path) -> None:
    url = f"s3://{bucket}/run/checkpoint"
    output = finish(
        tmp_path, *OPTIONS, "--checkpoint.folder", url, hook=partial(fail_to_store, s3_server.environment), ranks=1
    )
    message = f"the copies of metrics and reports beside the checkpoints in {url}: the store does not respond"
    assert output.count(message) == 1
    assert ObjectStorage(url).steps() == [2, 4]
    assert (tmp_path / "report.md").is_file()


class Recorded:
    """A storage that keeps outputs in memory."""

    def __init__(self) -> None:
        self.stored: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def store_output(self, name: str, file: Path) -> None:
        self.meanwhile()
        self.stored.append(f"{name} {file.read_text()}")

    def take(self) -> list[str]:
        stored, self.stored = self.stored, []
        return stored


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard/events").write_text("a")
    (tmp_path / "metrics.jsonl").write_text("b")
    return tmp_path


def test_only_what_has_changed_is_stored(folder: Path) -> None:
    storage: Any = Recorded()
    copies = BucketCopies(
        storage, folder, lambda: ["report.md"], lambda step: (folder / "report.md").write_text(f"{step}") and None
    )
    copies.update(10)
    assert storage.take() == ["metrics.jsonl b", "tensorboard/events a", "report.md 10"]
    (folder / "metrics.jsonl").write_text("bc")
    copies.update(100)
    assert storage.take() == ["metrics.jsonl bc", "report.md 100"]
    copies.store()
    assert storage.take() == []


def test_update_does_not_wait_for_the_one_before(folder: Path) -> None:
    storage: Any = Recorded()
    steps: list[int] = []
    copies = BucketCopies(storage, folder, list, steps.append)
    storage.meanwhile = lambda: copies.update(2)
    copies.update(1)
    assert steps == [1]
    storage.meanwhile = lambda: None

    # At the end of a run, the copies are those of its last moment.
    at_work, go_on = threading.Event(), threading.Event()
    storage.meanwhile = lambda: at_work.set() or go_on.wait(10)
    (folder / "metrics.jsonl").write_text("slow")
    thread = threading.Thread(target=copies.update, args=(3,))
    thread.start()
    assert at_work.wait(10)
    storage.meanwhile = lambda: None
    threading.Timer(0.1, go_on.set).start()
    (folder / "tensorboard/events").write_text("later")
    copies.store()
    thread.join()
    assert storage.take()[-1] == "tensorboard/events later"


def test_copies_that_fail_are_warned_of_once(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    storage: Any = Recorded()

    def fail() -> None:
        raise StorageError("the store does not respond")

    storage.meanwhile = fail
    copies = BucketCopies(storage, folder, list, lambda _: None)
    copies.update(1)
    copies.update(2)
    assert caplog.text.count("the store does not respond") == 1
    storage.meanwhile = lambda: None
    copies.update(3)
    assert storage.take() == ["metrics.jsonl b", "tensorboard/events a"]


def test_hook_that_fails_does_not_keep_metrics_from_being_stored(folder: Path) -> None:
    storage: Any = Recorded()

    def fail(_: int) -> None:
        raise ValueError("no report")

    BucketCopies(storage, folder, list, fail).update(1)
    assert storage.take() == ["metrics.jsonl b", "tensorboard/events a"]
