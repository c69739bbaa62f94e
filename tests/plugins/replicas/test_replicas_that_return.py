"""Replicas that hang and come back, or start, at the wrong moment."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crash_test_replicas import require_order
from forked_run import read_metrics
from replica_run import Kill, curves, differences
from s3_server import S3Server
from test_replicas import KillOnS3
from test_replicas_combined import ALL_DONE, BadBatch, bad_batch, write_config

from torchtrain.checkpoint.storage import open_storage
from torchtrain.plugins.object_storage.outputs import read_metrics as read_metrics_in

pytest.importorskip("torchft")
pytestmark = pytest.mark.slow
SHORT = "--replicas.collective_timeout_seconds=5"
RAMP = 'global_batch_size = "6, 12 at 0.5K"'  # the second batch begins with step 7
SLOW = Kill(slow_seconds=0.1)


@dataclass
class Stop(Kill):
    """SIGSTOP in place of SIGKILL, once; saves take some seconds more."""

    has_stopped: bool = False
    save_seconds: float = 0.0

    def now(self, place: str, step: int) -> None:
        if not self.has_stopped and place == self.place and step >= self.step > 0:
            self.has_stopped = True
            sys.stderr.write(f"killed: {place}, step {step}\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGSTOP)

    def install(self) -> None:
        super().install()
        import torchtrain.checkpoint.manager as manager

        save = manager.save_tensors

        def slow(*arguments: Any, **options: Any) -> None:
            time.sleep(self.save_seconds)
            save(*arguments, **options)

        manager.save_tensors = slow


@dataclass
class Wait(Kill):
    """Waits at the place, with the process alive, while ``file`` exists."""

    file: Path = Path()

    def now(self, place: str, step: int) -> None:
        if place == self.place and step >= self.step > 0 and self.file.exists():
            sys.stderr.write("hangs now\n")
            sys.stderr.flush()
            while self.file.exists():
                time.sleep(0.05)


def events(folder: Path, *names: str) -> list[tuple[int, str]]:
    return [(line["step"], line["event"]) for line in read_metrics(folder) if line.get("event") in names]


@pytest.mark.parametrize("save_seconds", [0.0, 4.0])
def test_a_leader_that_hangs_before_its_save(save_seconds: float, references: Any, started: Any) -> None:
    """It does not take the lease from the one that leads, and saves, when it comes back."""
    steps = ["--training.steps=60", "--lr_scheduler.total_steps=60"]
    reference = references(*steps)
    replicas = started(*steps, SHORT)
    replicas.start("0", Stop(5, "after the vote", slow_seconds=0.02))
    for name in "12":
        replicas.start(name, Stop(slow_seconds=0.1, save_seconds=save_seconds))
    replicas.wait_until(lambda: replicas.step() >= 11)
    replicas.kill("0", number=signal.SIGCONT)
    assert replicas.wait() == ALL_DONE, replicas.output()
    assert differences(replicas.folder, reference) == []
    assert not list((replicas.folder / "checkpoint").glob("*superseded*"))


class StopWhileWriting(Stop):
    """Suspended when it has read a line of its own, and before it writes it to the run's metrics."""

    def install(self) -> None:
        super().install()
        import torchtrain.plugins.replicas.files as files

        parsed = files.parsed

        def stopping(content: bytes) -> Iterator[dict[str, Any]]:
            for line in parsed(content):
                self.now("while writing", line["step"] if "loss" in line else 0)
                yield line

        files.parsed = stopping


def test_a_leader_that_hangs_while_it_writes_lines(references: Any, started: Any) -> None:
    """The one that takes over has written these lines when it comes back."""
    steps = ["--training.steps=60", "--lr_scheduler.total_steps=60"]
    reference = references(*steps)
    replicas = started(*steps, SHORT)
    replicas.start("0", StopWhileWriting(4, "while writing", slow_seconds=0.02))
    for name in "12":
        replicas.start(name, SLOW)
    replicas.wait_until(lambda: replicas.step() >= 8)
    replicas.kill("0", number=signal.SIGCONT)
    assert replicas.wait() == ALL_DONE, replicas.output()
    assert differences(replicas.folder, reference) == []
    require_order(read_metrics(replicas.folder))


@pytest.mark.parametrize("members", [2, 3])
def test_a_replica_that_hangs_with_its_process_alive(members: int, references: Any, started: Any) -> None:
    """The others wait for ``collective_timeout_seconds`` and a heartbeat (5 s each), not for the lighthouse's 60 s."""
    steps = ["--training.steps=60", "--lr_scheduler.total_steps=60"]
    reference = references(*steps)
    replicas = started(*steps, SHORT, members=members)
    file = replicas.folder / "hang"
    file.touch()
    names = [str(number) for number in range(members)]
    for name in names:
        replicas.start(name, Wait(5, "forward", slow_seconds=0.1, file=file) if name == "0" else SLOW)
    replicas.wait_until(lambda: "hangs now" in replicas.output())
    began = time.monotonic()
    replicas.wait_until(lambda: replicas.step() >= 8)
    assert time.monotonic() - began < 30
    file.unlink()
    assert replicas.wait() == {name: [0] for name in names}, replicas.output()
    assert differences(replicas.folder, reference) == []


@pytest.mark.parametrize(
    ("step", "place", "save_seconds"),
    [(4, "after the vote", 0.0), (6, "before the vote", 2.0), (6, "after the vote", 0.0)],
)
def test_a_leader_that_misses_the_border_of_two_parts(
    step: int, place: str, save_seconds: float, references: Any, started: Any, tmp_path: Path
) -> None:
    config = write_config(tmp_path, RAMP)
    reference = references(config=config)
    replicas = started(SHORT)
    (replicas.folder / "own.toml").write_text(config.read_text())
    replicas.start("0", Stop(step, place, save_seconds=save_seconds))
    for name in "12":
        replicas.start(name, Kill(slow_seconds=0.3))
    replicas.wait_until(lambda: replicas.step() >= 8)
    replicas.kill("0", number=signal.SIGCONT)
    assert replicas.wait() == ALL_DONE, replicas.output()
    assert differences(replicas.folder, reference) == []


@dataclass
class FailsToReceive(Kill):
    def install(self) -> None:
        super().install()
        if os.environ["RANK"] != "1":
            return
        from torchtrain.plugins.replicas.transport import StateTransport

        receive = StateTransport.recv_checkpoint

        def failing(*_: Any, **__: Any) -> None:
            StateTransport.recv_checkpoint = receive  # type: ignore[method-assign]
            raise RuntimeError("planted")

        StateTransport.recv_checkpoint = failing  # type: ignore[method-assign]


def test_one_rank_does_not_learn_that_the_stage_has_ended(references: Any, started: Any, tmp_path: Path) -> None:
    config = write_config(tmp_path, RAMP)
    reference = references(config=config, ranks=2)
    replicas = started(SHORT, "--comm.train_timeout_seconds=60", ranks=2)
    (replicas.folder / "own.toml").write_text(config.read_text())
    for name in "012":
        replicas.start(name, FailsToReceive(slow_seconds=0.1) if name == "0" else Kill(slow_seconds=0.3))
    replicas.wait_until(lambda: replicas.step() >= 4)
    replicas.kill("0", number=signal.SIGSTOP)
    replicas.wait_until(lambda: replicas.step() >= 8)
    replicas.kill("0", number=signal.SIGCONT)
    assert replicas.wait() == {name: [0, 0] for name in "012"}, replicas.output()
    assert differences(replicas.folder, reference) == []


def test_the_lines_of_a_rollback_after_a_change_of_the_leader(references: Any, started: Any) -> None:
    options = ["--faults.on_nonfinite=rollback", "--faults.max_bad_steps=3", "--checkpoint.async_mode=disabled"]
    reference = references(*options, hook=bad_batch)
    replicas = started(*options)
    for name in "012":
        replicas.start(name, BadBatch(7, "all-reduce") if name == "0" else BadBatch())
    replicas.wait_for_death("0")
    replicas.start("0", BadBatch())
    assert replicas.wait() == ALL_DONE, replicas.output()
    assert differences(replicas.folder, reference, steps=[*range(1, 8), *range(6, 13)]) == []
    assert events(replicas.folder, "rolled_back") == [(5, "rolled_back")]


def test_a_new_run_in_the_folder_of_an_old_one(started: Any) -> None:
    replicas = started(members=1)
    for _ in range(2):
        replicas.start("0")
        assert replicas.wait() == {"0": [0]}, replicas.output()
        assert [step for step, _, _ in curves(replicas.folder)] == list(range(1, 13))
        shutil.rmtree(replicas.folder / "checkpoint")


def test_only_one_replica_too_many_ends(started: Any) -> None:
    replicas = started("--training.local_batch_size=6", "--training.steps=100", members=1)
    for name in "01":
        replicas.start(name, SLOW)
    replicas.wait_until(lambda: "members: 0, 1" in replicas.output())
    replicas.start("2")
    replicas.wait_until(lambda: replicas.is_dead("2"))
    assert replicas.codes("2") == [2]
    assert "for at most 2 replicas" in replicas.log("2").read_text()
    assert replicas.wait() == {"0": [0], "1": [0], "2": [2]}, replicas.output()


def test_too_few_replicas_wait(started: Any) -> None:
    replicas = started("--replicas.min=2", members=1)
    replicas.start("0")
    replicas.wait_until(lambda: "waits for more" in replicas.output())
    time.sleep(3)
    assert replicas.step() == 0
    replicas.start("1")
    assert replicas.wait() == {"0": [0], "1": [0]}, replicas.output()


def test_a_replica_that_waits_for_others_obeys_a_request_to_stop(started: Any) -> None:
    replicas = started("--replicas.min=2", "--training.steps=60", members=2)
    for name in "01":
        replicas.start(name, SLOW)
    replicas.wait_until(lambda: replicas.step() >= 8)
    replicas.kill("1")
    replicas.wait_for_death("1")
    replicas.wait_until(lambda: "waits for more" in replicas.output())
    replicas.kill("0", number=signal.SIGTERM)
    replicas.wait_until(lambda: replicas.is_dead("0"))
    assert replicas.codes("0") == [75], replicas.output()
    assert (replicas.folder / f"checkpoint/step-{replicas.step()}").is_dir()  # nothing is lost


def test_a_replica_that_starts_learns_that_all_stop(started: Any) -> None:
    replicas = started("--replicas.on_stop=all", "--training.steps=40", members=2)
    replicas.start("0", Kill(slow_seconds=0.3))
    replicas.start("1", Kill(4, "after the vote", slow_seconds=0.3))
    replicas.wait_for_death("1")
    replicas.start("1", Kill(slow_seconds=0.05))
    replicas.wait_until((replicas.folder / "connected-1").exists)
    replicas.kill("0", number=signal.SIGTERM)
    assert replicas.wait() == {"0": [75], "1": [75]}, replicas.output()


@dataclass
class SlowResume(Kill):
    def install(self) -> None:
        super().install()
        from torchtrain.checkpoint.manager import CheckpointManager

        resume = CheckpointManager.resume

        def slow(manager: CheckpointManager) -> int | None:
            step = resume(manager)
            time.sleep(12)
            return step

        CheckpointManager.resume = slow  # type: ignore[method-assign]


def test_a_lower_name_starts_while_the_checkpoint_is_loaded(started: Any) -> None:
    replicas = started(members=1)
    for name in "01":
        replicas.start(name, SLOW)
    replicas.wait_until(lambda: replicas.step() >= 8)
    for name in "01":
        replicas.kill(name)
        replicas.wait_for_death(name)
    changed = ["--optimizer.lr=3e-2", "--checkpoint.allow_changes=optimizer.lr"]
    replicas.start("1", SlowResume(), *changed)
    replicas.wait_until(lambda: "resumed from" in replicas.log("1").read_text())
    time.sleep(1)
    replicas.start("0", None, *changed)
    assert replicas.wait() == {"0": [0], "1": [0]}, replicas.output()
    rates = {line["step"]: line["lr"] for line in read_metrics(replicas.folder) if "lr" in line and "event" not in line}
    assert [rates[step] for step in range(6, 13)] == [3e-2] * 7
    assert [step for step, _ in events(replicas.folder, "start")][-1] == 5


@dataclass
class VerySlowSave(KillOnS3):
    def install(self) -> None:
        super().install()
        import torchtrain.checkpoint.manager as manager

        save = manager.save_tensors

        def slow(*arguments: Any, **options: Any) -> None:
            time.sleep(60)
            save(*arguments, **options)

        manager.save_tensors = slow


def test_lines_before_a_save_that_is_never_complete(
    references: Any, started: Any, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replica 1 joins while 0 saves step 5, and 0 dies with its disk before the save is complete."""

    for key, value in s3_server.environment.items():
        monkeypatch.setenv(key, value)
    reference = references()
    folder = f"s3://{s3_server.make_bucket('disks')}/run/checkpoint"
    replicas = started("--checkpoint.folder", folder, members=2)
    environment = s3_server.environment

    def start(name: str, kill: Kill) -> None:
        disk = replicas.folder / f"disk-{name}"
        shutil.rmtree(disk, ignore_errors=True)
        replicas.start(name, kill, "--job.dump_folder", str(disk))

    start("0", VerySlowSave(9, "after the vote", environment=environment))
    start("1", KillOnS3(6, "after the vote", environment=environment))
    replicas.wait_for_death("1")
    start("1", KillOnS3(environment=environment, slow_seconds=0.05))
    replicas.wait_for_death("0")
    start("0", KillOnS3(environment=environment))
    assert replicas.wait() == {"0": [0], "1": [0]}, replicas.output()
    (replicas.folder / "metrics.jsonl").write_bytes(read_metrics_in(open_storage(folder).open(12)))
    assert curves(replicas.folder) == sorted(reference.curve.values())


@dataclass
class Held(Kill):
    """Waits before it registers, while there is a file."""

    file: Path | None = None

    def install(self) -> None:
        super().install()
        from torchtrain.plugins.replicas.group import ReplicaGroup

        connect, file = ReplicaGroup.connect, self.file
        assert file is not None

        def late(*arguments: Any, **options: Any) -> None:
            file.with_suffix(".ready").touch()
            while file.exists():
                time.sleep(0.02)
            connect(*arguments, **options)

        ReplicaGroup.connect = late  # type: ignore[method-assign]


def start_held(replicas: Any, name: str, slow_seconds: float = 0.1) -> Path:
    """Start a replica that has looked for checkpoints, and registers when the returned file is deleted."""
    file = Path(replicas.folder / f"held-{name}")
    file.touch()
    replicas.start(name, Held(file=file, slow_seconds=slow_seconds))
    replicas.wait_until(file.with_suffix(".ready").exists)
    return file


def test_a_new_lighthouse_that_knows_one_that_starts(references: Any, started: Any) -> None:
    """It does not begin the run again beside those that train, and wait between two looks for the lighthouse."""
    steps = ["--training.steps=40", "--lr_scheduler.total_steps=40", "--checkpoint.interval=100"]
    reference = references(*steps)
    replicas = started(*steps, SHORT)
    for name in "012":
        replicas.start(name, SLOW)
    replicas.wait_until(lambda: replicas.step() >= 6)
    replicas.lighthouse.kill()
    replicas.kill("2")
    replicas.wait_for_death("2")
    held = start_held(replicas, "2")
    time.sleep(3)
    for name in "01":  # between two looks for the lighthouse
        replicas.kill(name, number=signal.SIGSTOP)
    replicas.restart_lighthouse()
    held.unlink()
    replicas.wait_until(lambda: "the lighthouse does not know 0, 1, 2, which train" in replicas.log("2").read_text())
    time.sleep(2)
    for name in "01":
        replicas.kill(name, number=signal.SIGCONT)
    assert replicas.wait() == ALL_DONE, replicas.output()
    assert differences(replicas.folder, reference) == []
    assert events(replicas.folder, "start") == [(0, "start")]
    assert not list(replicas.folder.glob("metrics.1.jsonl"))


@pytest.mark.parametrize("kept", [0, 1])
def test_a_slow_start_of_a_run_that_is_complete_meanwhile(kept: int, references: Any, started: Any) -> None:
    reference = references()
    replicas = started(f"--checkpoint.keep_latest_k={kept}", members=1)
    replicas.start("0", Kill(slow_seconds=0.05))
    replicas.wait_until((replicas.folder / "checkpoint/step-5").exists)
    held = start_held(replicas, "1")
    replicas.wait_until(lambda: replicas.is_dead("0"))
    before = {file: file.read_bytes() for file in replicas.folder.rglob("*") if file.match("*/step-*/*")}
    held.unlink()
    assert replicas.wait() == {"0": [0], "1": [0]}, replicas.output()
    assert "the run is complete: step 12 of 12" in replicas.log("1").read_text()
    assert differences(replicas.folder, reference) == []
    assert {file: file.read_bytes() for file in before} == before
    assert not list((replicas.folder / "checkpoint").glob("*superseded*"))


def test_a_slow_start_after_all_others_have_died(references: Any, started: Any) -> None:
    """It resumes from the newest checkpoint, not from that which it found at its start, and was deleted."""
    reference = references()
    replicas = started("--checkpoint.keep_latest_k=1", "--checkpoint.interval=2", members=1)
    replicas.start("0", Kill(11, "before the vote", slow_seconds=0.05))
    replicas.wait_until((replicas.folder / "checkpoint/step-4").exists)
    held = start_held(replicas, "1")
    replicas.wait_for_death("0")
    held.unlink()
    replicas.wait_until(lambda: replicas.is_dead("1"))
    assert replicas.codes("1") == [0], replicas.output()
    assert events(replicas.folder, "start") == [(0, "start"), (10, "start")]
    assert differences(replicas.folder, reference) == []


@dataclass
class FailsLate(Kill):
    """Rank 0 receives a state; rank 1 waits for that, and while there is a file, and does not."""

    file: Path = Path()

    def install(self) -> None:
        super().install()
        from torchtrain.plugins.replicas.transport import StateTransport

        receive, received = StateTransport.recv_checkpoint, self.file.with_suffix(".received")

        def receiving(*arguments: Any, **options: Any) -> Any:
            if os.environ["RANK"] == "0":
                state = receive(*arguments, **options)
                received.touch()
                return state
            while self.file.exists() or not received.exists():
                time.sleep(0.02)
            raise RuntimeError("planted")

        StateTransport.recv_checkpoint = receiving  # type: ignore[method-assign]


def test_nobody_takes_a_state_of_which_a_replica_has_only_a_part(references: Any, started: Any) -> None:
    """Rank 0 of replica 0 has got the state of replica 1, and rank 1 has not, when replica 1 dies and 2 starts."""
    steps = ["--training.steps=40", "--lr_scheduler.total_steps=40"]
    reference = references(*steps, ranks=2)
    replicas = started(*steps, SHORT, "--comm.train_timeout_seconds=60", ranks=2, members=2)
    file = replicas.folder / "fails"
    file.touch()
    replicas.start("0", FailsLate(file=file, slow_seconds=0.1))
    replicas.start("1", SLOW)
    replicas.wait_until(lambda: replicas.step() >= 4)
    replicas.kill("0", number=signal.SIGSTOP)
    replicas.wait_until(lambda: replicas.step() >= 8)
    held = start_held(replicas, "2")
    replicas.kill("0", number=signal.SIGCONT)
    replicas.wait_until(file.with_suffix(".received").exists)
    replicas.kill("1")
    replicas.wait_for_death("1")
    held.unlink()
    replicas.wait_until((replicas.folder / "connected-2").exists)
    file.unlink()
    assert replicas.wait() == {"0": [74, 74], "1": [-9, -9], "2": [0, 0]}, replicas.output()
    assert "this one has a part of it" in replicas.log("0").read_text()
    repeated = [of for of in differences(replicas.folder, reference) if not of.startswith("steps ")]
    assert repeated == []
    require_order(read_metrics(replicas.folder))


@pytest.mark.parametrize("hangs", [False, True])
def test_of_two_processes_of_one_replica_the_older_one_ends(hangs: bool, references: Any, started: Any) -> None:
    steps = ["--training.steps=40", "--lr_scheduler.total_steps=40"]
    reference = references(*steps)
    replicas = started(*steps, SHORT, members=2)
    for name in "01":
        replicas.start(name, SLOW)
    replicas.wait_until(lambda: replicas.step() >= 6)
    older = replicas.processes["0"]
    if hangs:
        replicas.kill("0", number=signal.SIGSTOP)
    replicas.start("0", SLOW)
    if hangs:
        replicas.wait_until(lambda: replicas.step() >= 12)
        os.kill(older[0].pid, signal.SIGCONT)
    replicas.wait_until(lambda: older[0].exitcode is not None)
    assert older[0].exitcode == 2, replicas.output()
    assert "another process of the replica '0' has started later" in replicas.log("0").read_text()
    assert replicas.wait() == {"0": [0], "1": [0]}, replicas.output()
    assert differences(replicas.folder, reference) == []
    require_order(read_metrics(replicas.folder))


@pytest.mark.parametrize(
    ("place", "step", "resumed"), [("in a save", 11, 5), ("after the vote", 8, 5), ("in a save", 13, 10)]
)
def test_a_replica_alone_hangs_until_others_have_resumed(
    place: str, step: int, resumed: int, references: Any, started: Any
) -> None:
    """It is ahead of them, and takes their state: they write its steps again."""
    reference = references()
    replicas = started(SHORT, members=1)
    replicas.start("0", Stop(step, place, slow_seconds=0.02))
    replicas.wait_until(lambda: "killed: " in replicas.output())
    for name in "12":
        replicas.start(name, Kill(slow_seconds=0.3))
    replicas.wait_until(lambda: (resumed, "start") in events(replicas.folder, "start"))
    time.sleep(1)
    replicas.kill("0", number=signal.SIGCONT)
    assert replicas.wait() == ALL_DONE, replicas.output()
    assert events(replicas.folder, "start", "rolled_back") == [(0, "start"), (resumed, "start")]
    written = len(curves(replicas.folder)) - (12 - resumed)  # by the one that was alone
    steps = [*range(1, written + 1), *range(resumed + 1, 13)]
    assert differences(replicas.folder, reference, steps=steps) == []
    require_order(read_metrics(replicas.folder))


def test_a_damaged_checkpoint_is_set_aside_by_the_one_that_leads(references: Any, started: Any) -> None:
    reference = references()
    replicas = started("--training.steps=10", members=2)
    for name in "01":
        replicas.start(name)
    assert replicas.wait() == {"0": [0], "1": [0]}, replicas.output()
    (replicas.folder / "checkpoint/step-10/manifest.json").unlink()
    for name in "01":
        (replicas.folder / f"connected-{name}").unlink()
        replicas.start(name, None, "--training.steps=12")
    assert replicas.wait() == {"0": [0], "1": [0]}, replicas.output()
    assert len(list((replicas.folder / "checkpoint").glob("step-10.damaged*"))) == 1
    assert differences(replicas.folder, reference, steps=[*range(1, 11), *range(6, 13)]) == []
