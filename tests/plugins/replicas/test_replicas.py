"""Replicas that die and join: the run has the bits of one that nothing has disturbed."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from crash_test_s3 import tensors
from data_samples import DOCUMENTS, write_jsonl, write_tokens
from forked_command import ROOT
from forked_run import different_tensors, finish, read_metrics
from forkserver import free_port
from s3_server import S3Server

from torchtrain.checkpoint.storage import open_storage
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.plugins.object_storage.outputs import read_metrics as read_metrics_in

pytest.importorskip("torchft")
from replica_run import (
    CONFIG,
    PLACES,
    SHAPE,
    Kill,
    curves,
    differences,
    events,
    kill_and_restart,
)

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "fsdp": (2, []),
    "tensor": (2, ["--parallelism.tensor_parallel_degree=2"]),
    "pipeline": (2, ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2"]),
}
MUON = [
    *("--optimizer.name=muon", "--ema.enable", "--faults.spike_threshold=50", "--faults.spike_window=4"),
    *("--validation.enable", "--validation.type=standard_library_docs", "--validation.interval=4"),
    "--validation.steps=1",
]
SLOW = Kill(slow_seconds=0.05)
# Enough for a death, a return, and a checkpoint.
NINE = ["--training.steps=9", "--lr_scheduler.total_steps=9"]
# Of two replicas, in few microbatches. The default tests share the reference of this run.
QUICK = [*NINE, "--training.local_batch_size=3", "--training.mixed_precision_param=float32"]
RECHECK = ["--recheck.interval=1", "--recheck.on_wrong_rank=stop"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_deaths_change_no_bit(device: str, references: Any, started: Any) -> None:
    """Of replicas of two ranks; on a GPU, which both replicas share, sums and states pass through pinned memory."""
    options, checks, ranks = QUICK, RECHECK, 2
    if device == "cuda":
        options, checks, ranks = [*NINE, "--job.device=cuda", "--training.deterministic"], [], 1
    replicas = started(*options, *checks, ranks=ranks, members=2)
    replicas.start("1", Kill(4, "all-reduce"))
    replicas.start("0", Kill(5, "in a save"))
    for replica in ("1", "0"):
        replicas.wait_for_death(replica)
        replicas.start(replica)
    assert replicas.wait() == {"0": [0] * ranks, "1": [0] * ranks}, replicas.output()
    assert differences(replicas.folder, references(*options)) == []
    # A death in the sum of gradients discards the step of those that are left. Which of them writes the line depends on
    # who was a member: so look into all files.
    found = [event for folder in (replicas.folder, *replicas.folder.glob("replicas/*")) for event in events(folder)]
    assert {"replica_left", "replica_joined", "step_discarded"} <= set(found)
    assert events(replicas.folder).count("start") == 1
    assert "wrong_replica" not in found  # one that joins has the state of the others


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_death_anywhere_in_a_step_changes_no_bit(place: str, layout: str, references: Any, started: Any) -> None:
    ranks, options = LAYOUTS[layout]
    options = [*NINE, *options]
    reference = references(*options, ranks=ranks)
    members = 2 if place == "in a save" else 3
    replicas = started(*options, ranks=ranks, members=members)
    victim = "0" if PLACES.index(place) % 2 else "1"
    # Rank 0 of replica 0 writes the checkpoints.
    assert kill_and_restart(replicas, [victim], Kill(5, place)) == {name: [0] * ranks for name in "012"[:members]}
    assert differences(replicas.folder, reference) == []


@pytest.mark.slow
def test_a_death_changes_no_bit_of_one_rank_with_grains(references: Any, started: Any) -> None:
    grains = ["--grains.tensor=2", "--grains.context=2"]
    replicas = started(*grains, "--parallelism.tensor_parallel_degree=2", ranks=2)
    assert kill_and_restart(replicas, ["1"], Kill(5, "all-reduce")) == {name: [0, 0] for name in "012"}
    assert differences(replicas.folder, references(*grains)) == []


@pytest.mark.slow
def test_two_at_once_with_muon_averages_and_validation(references: Any, started: Any) -> None:
    reference = references(*MUON)
    replicas = started(*MUON)
    assert kill_and_restart(replicas, ["0", "2"], Kill(6, "before the vote")) == {name: [0] for name in "012"}
    assert differences(replicas.folder, reference) == []

    def validated(folder: Path) -> list[tuple[int, float]]:
        return [(line["step"], line["validation_loss"]) for line in read_metrics(folder) if "validation_loss" in line]

    assert validated(replicas.folder) == validated(reference.folder) != []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prepared", "mixture with document masks"])
def test_a_death_changes_no_bit_on_other_data(kind: str, references: Any, started: Any, tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "texts.jsonl", DOCUMENTS)
    prepared = write_tokens(tmp_path / "prepared", texts)
    data = ["--data.path", prepared]
    if kind != "prepared":
        mixture = f'[[data.sources]]\npath = "{texts}"\n[[data.sources]]\npath = "{prepared}"\nweight = 2\n'
        (tmp_path / "mixture.toml").write_text(f"{CONFIG}{mixture}")
        data = ["--data.document_mask"]
    reference = references(*data, config=tmp_path / "mixture.toml" if kind != "prepared" else None)
    replicas = started(*data)
    if kind != "prepared":
        shutil.copyfile(tmp_path / "mixture.toml", replicas.folder / "own.toml")
    assert kill_and_restart(replicas, ["0", "2"], Kill(6, "all-reduce")) == {name: [0] for name in "012"}
    assert differences(replicas.folder, reference) == []


@dataclass
class KillOnS3(Kill):
    """In a process with these variables for the S3 server."""

    environment: dict[str, str] = field(default_factory=dict)

    def install(self) -> None:
        os.environ.update(self.environment)
        super().install()


@pytest.mark.slow
def test_a_death_changes_no_bit_with_checkpoints_in_a_bucket(
    references: Any, started: Any, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica that saves dies in a save; after the next save all die, and resume from the bucket."""
    for key, value in s3_server.environment.items():
        monkeypatch.setenv(key, value)
    steps = ["--training.steps=20", "--lr_scheduler.total_steps=20"]
    reference = references(*steps)
    folder = f"s3://{s3_server.make_bucket('replicas')}/run/checkpoint"
    replicas = started(*steps, "--checkpoint.folder", folder)
    alive = KillOnS3(environment=s3_server.environment, slow_seconds=0.05)
    for replica in "012":
        dies = KillOnS3(5, "in a save", environment=s3_server.environment) if replica == "0" else alive
        replicas.start(replica, dies)
    replicas.wait_for_death("0")
    replicas.start("0", alive)
    replicas.wait_until(lambda: replicas.step() >= 13)
    for replica in "012":
        replicas.kill(replica)
        replicas.wait_for_death(replica)
    for replica in "012":
        replicas.start(replica, alive)
    assert replicas.wait() == {name: [0] for name in "012"}, replicas.output()
    assert "resumed from s3://" in replicas.output()
    storage = open_storage(folder)
    assert storage.steps()[-1] == 20
    assert different_tensors(tensors(storage.open(20)), reference.tensors) == []
    assert {line[0]: line for line in curves(replicas.folder)} == reference.curve


@pytest.mark.slow
def test_the_metrics_of_replicas_that_share_only_a_bucket(
    references: Any, started: Any, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first dies with its disk after the save of step 5, later the two others: step 1 is on no disk any more."""
    for key, value in s3_server.environment.items():
        monkeypatch.setenv(key, value)
    steps = ["--training.steps=20", "--lr_scheduler.total_steps=20"]
    reference = references(*steps)
    folder = f"s3://{s3_server.make_bucket('disks')}/run/checkpoint"
    replicas = started(*steps, "--checkpoint.folder", folder)
    alive = KillOnS3(environment=s3_server.environment, slow_seconds=0.05)

    def start(name: str, kill: Kill = alive) -> None:
        disk = replicas.folder / f"disk-{name}"
        shutil.rmtree(disk, ignore_errors=True)
        replicas.start(name, kill, "--job.dump_folder", str(disk))

    start("0", KillOnS3(8, "all-reduce", environment=s3_server.environment))
    start("1", KillOnS3(13, "after the vote", environment=s3_server.environment))
    start("2", KillOnS3(13, "after the vote", environment=s3_server.environment))
    replicas.wait_for_death("0")
    start("0")
    for name in "12":
        replicas.wait_for_death(name)
        start(name)
    assert replicas.wait() == {name: [0] for name in "012"}, replicas.output()
    last = open_storage(folder).open(20)
    assert different_tensors(tensors(last), reference.tensors) == []
    (replicas.folder / "metrics.jsonl").write_bytes(read_metrics_in(last))
    assert curves(replicas.folder) == sorted(reference.curve.values())


def test_all_die_and_resume_from_the_checkpoint(references: Any, started: Any) -> None:
    reference, replicas = references(*QUICK), started(*QUICK, members=2)
    for replica in "01":
        replicas.start(replica, SLOW)
    replicas.wait_until(lambda: replicas.step() >= 7)
    for replica in "01":
        replicas.kill(replica)
        replicas.wait_for_death(replica)
    for replica in "01":
        replicas.start(replica)
    assert replicas.wait() == {"0": [0], "1": [0]}, replicas.output()
    assert "resumed from" in replicas.output()
    last = {line[0]: line for line in curves(replicas.folder)}  # steps after the checkpoint come twice
    assert last == reference.curve
    assert not [line for line in differences(replicas.folder, reference) if "in the run's metrics" not in line]


@pytest.mark.slow
def test_a_joiner_has_the_state_of_the_others(started: Any) -> None:
    """By a vote of three replicas."""
    replicas, names = started(*NINE, *RECHECK), "012"
    for name in names:
        replicas.start(name, Kill(4, "after the vote") if name == "1" else None)
    replicas.wait_for_death("1")
    replicas.start("1")
    assert replicas.wait() == {name: [0] for name in names}, replicas.output()
    assert "wrong_replica" not in events(replicas.folder)


@pytest.mark.slow
def test_a_start_after_the_end_has_nothing_to_do(references: Any, started: Any) -> None:
    reference, replicas = references(), started(members=1)
    replicas.start("0")
    assert replicas.wait() == {"0": [0]}
    replicas.start("1")
    assert replicas.wait() == {"0": [0], "1": [0]}
    assert "the run is complete" in replicas.log("1").read_text()
    assert differences(replicas.folder, reference) == []


@dataclass
class Stop(Kill):
    """A request to stop, in place of SIGKILL; saves take a second more."""

    is_sent: bool = False

    def now(self, place: str, step: int) -> None:
        if place == "in a save":
            time.sleep(1)
        elif place == self.place and step == self.step and not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_leader_stops_in_the_step_of_a_slow_save(references: Any, started: Any) -> None:
    """It leaves before this save, so for the last one, of the same step, it cannot ask who is a member."""
    reference, replicas = references(*QUICK), started(*QUICK, "--checkpoint.async_mode=disabled", members=2)
    replicas.start("0", Stop(5, "before clipping"))
    replicas.start("1")
    assert replicas.wait() == {"0": [75], "1": [0]}, replicas.output()
    assert curves(replicas.folder / "replicas/0")[-1][0] == 5
    assert differences(replicas.folder, reference) == []


class StopForLateData(Kill):
    """The fifth batch takes a minute, and a request to stop comes meanwhile."""

    def install(self) -> None:
        super().install()
        read = DataLoader._read

        def read_late(loader: DataLoader) -> Any:
            if loader.drop_last and loader._step == 4:
                time.sleep(3)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            return read(loader)

        DataLoader._read = read_late  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_replica_that_waits_for_data_leaves_when_it_is_asked_to_stop(
    victim: str, references: Any, started: Any
) -> None:
    reference, replicas = references(*QUICK), started(*QUICK, members=2)
    for replica in "01":
        replicas.start(replica, StopForLateData() if replica == victim else None)
    assert replicas.wait() == {name: [75 if name == victim else 0] for name in "01"}, replicas.output()
    assert curves(replicas.folder / "replicas" / victim)[-1][0] == 4
    assert differences(replicas.folder, reference) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_request_to_stop_makes_one_replica_leave(victim: str, references: Any, started: Any) -> None:
    reference, replicas = references(), started()
    for replica in "012":
        replicas.start(replica, SLOW)
    replicas.wait_until(lambda: replicas.step() >= 4 and "step " in replicas.log(victim).read_text())
    replicas.kill(victim, number=signal.SIGTERM)
    codes = replicas.wait()
    assert codes == {name: [75 if name == victim else 0] for name in "012"}, replicas.output()
    assert differences(replicas.folder, reference) == []


@pytest.mark.slow
@pytest.mark.parametrize("continued", ["by replicas", "by one job"])
def test_a_request_to_stop_all(continued: str, references: Any, started: Any) -> None:
    reference, replicas = references(), started("--replicas.on_stop=all")
    for replica in "012":
        replicas.start(replica, SLOW)
    replicas.wait_until(lambda: replicas.step() >= 4 and all("step " in replicas.log(of).read_text() for of in "012"))
    replicas.kill("1", number=signal.SIGTERM)
    assert replicas.wait() == {name: [75] for name in "012"}, replicas.output()
    ends = {curves(replicas.folder / "replicas" / name)[-1][0] for name in "012"}
    assert len(ends) == 1
    assert (replicas.folder / f"checkpoint/step-{ends.pop()}").is_dir()
    if continued == "by one job":
        finish(replicas.folder, "--job.config_file", str(replicas.folder / "own.toml"), ranks=1, shape=SHAPE)
    else:
        for replica in "012":
            replicas.start(replica)
        assert replicas.wait() == {name: [0] for name in "012"}
    assert differences(replicas.folder, reference) == []


@pytest.mark.slow
def test_a_replica_that_hangs_comes_back(references: Any, started: Any) -> None:
    steps = ["--training.steps=60", "--lr_scheduler.total_steps=60"]
    reference = references(*steps)
    replicas = started(*steps, "--replicas.collective_timeout_seconds=5")
    for replica in "012":
        replicas.start(replica, SLOW)
    replicas.wait_until(lambda: replicas.step() >= 8 and "step " in replicas.log("0").read_text())
    replicas.kill("0", number=signal.SIGSTOP)
    before = replicas.step()
    replicas.wait_until(lambda: replicas.step() >= before + 4)
    replicas.kill("0", number=signal.SIGCONT)
    assert replicas.wait() == {name: [0] for name in "012"}, replicas.output()
    assert differences(replicas.folder, reference) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one rank", "fsdp"])
def test_random_deaths(layout: str, references: Any, started: Any) -> None:
    ranks, options = LAYOUTS[layout]
    options = [*options, "--training.steps=60", "--lr_scheduler.total_steps=60"]
    reference = references(*options, ranks=ranks)
    replicas, chance = started(*options, ranks=ranks), random.Random(0)
    for replica in "012":
        replicas.start(replica, SLOW)

    def has_ended() -> bool:
        return any(all(code == 0 for code in replicas.codes(name)) for name in "012")

    while not has_ended():
        target = replicas.step() + chance.randint(1, 5)
        replicas.wait_until(lambda target=target: replicas.step() >= target or has_ended())
        time.sleep(chance.uniform(0.0, 0.5))
        victim = chance.choice("012")  # it may also be starting, or joining
        if not has_ended():
            replicas.kill(victim, chance.randrange(ranks))
            replicas.wait_for_death(victim)
            replicas.start(victim, SLOW)
    for name in "012":
        if any(code not in (0, None) for code in replicas.codes(name)):
            replicas.start(name)
    codes = replicas.wait()
    assert all(code == 0 for of in codes.values() for code in of), replicas.output()
    assert replicas.deaths > 0
    found = [line for line in differences(replicas.folder, reference) if "in the run's metrics" not in line]
    assert found == [], json.dumps(found)


@pytest.mark.slow
def test_a_new_lighthouse_at_the_old_address(references: Any, started: Any) -> None:
    steps = ["--training.steps=40", "--lr_scheduler.total_steps=40"]
    reference, replicas = references(*steps), started(*steps)
    for replica in "012":
        replicas.start(replica, SLOW)
    replicas.wait_until(lambda: replicas.step() >= 8)
    replicas.restart_lighthouse()
    before = replicas.step()
    replicas.wait_until(lambda: replicas.step() >= before + 5)
    replicas.kill("1")
    replicas.wait_for_death("1")
    replicas.start("1")
    assert replicas.wait() == {name: [0] for name in "012"}, replicas.output()
    assert differences(replicas.folder, reference) == []


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    if shutil.which("torchft_lighthouse") is None:
        pytest.skip("torchft_lighthouse is not in PATH")
    page = (ROOT / "docs/replicas.md").read_text()
    commands = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    commands = commands.replace("outputs/replicas", str(tmp_path / "run")).replace("29510", str(free_port()))
    lighthouse, *replicas = [line for line in commands.splitlines() if "127.0.0.1" in line]
    few = ["--training.steps", "8", "--metrics.log_freq", "1"]
    environment = {**os.environ, "NGPU": "1", "OMP_NUM_THREADS": "1"}
    processes = []

    def start(command: str, *options: str) -> "subprocess.Popen[bytes]":
        with (tmp_path / "log.txt").open("a") as log:
            process = subprocess.Popen(
                [*shlex.split(command), *options],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        processes.append(process)
        return process

    def wait_for_step(step: int) -> None:
        deadline = time.monotonic() + 240
        while not any("loss" in line and line["step"] >= step for line in read_metrics(tmp_path / "run")):
            assert time.monotonic() < deadline, (tmp_path / "log.txt").read_text()
            time.sleep(0.1)

    try:
        start(lighthouse)
        first, second = (start(command, *few) for command in replicas)
        wait_for_step(2)
        os.killpg(second.pid, signal.SIGKILL)
        second = start(replicas[1], *few)
        codes = first.wait(timeout=240), second.wait(timeout=240)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert codes == (0, 0), (tmp_path / "log.txt").read_text()
    assert [step for step, _, _ in curves(tmp_path / "run")] == list(range(1, 9))
    assert (tmp_path / "run/checkpoint/step-8").is_dir()
