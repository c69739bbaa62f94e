"""The parts of a replica that need no other replica: rows, options, the run's files."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from forked_command import run_command
from forked_run import nothing
from forkserver import free_port
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtrain.checkpoint.resume_compatibility import hash_of_changes
from torchtrain.config.parse import parse, to_toml
from torchtrain.config.registry import TRAINERS
from torchtrain.config.schema import JobConfig, MetricsConfig, section_of
from torchtrain.distributed.replicas import Replicas
from torchtrain.errors import ConfigError, StorageError
from torchtrain.metrics.writers import Writers
from torchtrain.plugins.replicas import checks
from torchtrain.plugins.replicas.files import RunFiles
from torchtrain.plugins.replicas.group import Member
from torchtrain.plugins.replicas.heartbeat import Heartbeat
from torchtrain.plugins.replicas.options import ReplicasConfig
from torchtrain.plugins.replicas.place import PlaceState
from torchtrain.plugins.replicas.rows import rows_of

REPLICA = ["--replicas.lighthouse=http://localhost:1", "--replicas.id=0", "--training.sums=exact"]
REPLICA += ["--training.global_batch_size=12"]


@pytest.mark.parametrize("replicas", range(1, 7))
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_row_is_of_one_rank(replicas: int, ranks: int) -> None:
    rows = [
        rows_of(replica, replicas, rank, ranks, global_batch_size=24, local_batch_size=2)
        for replica in range(replicas)
        for rank in range(ranks)
    ]
    assert [row for of in rows for row in of] == list(range(24))
    assert [of for of in rows if len(of) % 2 != 0] == []
    assert max(map(len, rows)) - min(map(len, rows)) <= 2


def test_more_replicas_than_microbatches_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"rows for at most 3 replicas of 2 x 2 rows .* and 4 replicas are there"):
        rows_of(3, 4, 0, 2, global_batch_size=12, local_batch_size=2)
    # The others have all rows.
    others = [rows_of(replica, 4, 0, 2, global_batch_size=12, local_batch_size=2) for replica in range(3)]
    assert others == [rows_of(replica, 3, 0, 2, global_batch_size=12, local_batch_size=2) for replica in range(3)]


def test_a_member_is_the_same_after_its_sum() -> None:
    member = Member(1, 12, -1, 0, 2**63 - 1, 3, -(2**63), "f" * 16 + "0123456789abcdef", "replica-3")
    assert Member.of(torch.tensor(member.row).tolist()) == member
    assert Member.of(replace(member, name="a very long name of a replica").row).name == "a very long name"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas.id="], "replicas.id is empty, and neither SLURM_ARRAY_TASK_ID"),
        (["--replicas.id=../x"], "replicas.id = '../x' names a folder"),
        (["--training.sums=fast"], "training.sums = 'fast' rounds sums in an order"),
        (["--training.global_batch_size=-1"], "training.global_batch_size = -1 depends on the number of ranks"),
        (["--data.type=hub", "--data.name=x"], r"streamed data \(by URL, or from the hub\) cannot be combined"),
        (["--data.path=s3://bucket/x.jsonl"], "streamed data .* cannot be combined"),
        (["--data.when_exhausted=stop"], "data.when_exhausted = 'stop' cannot be combined"),
        (["--comparison.fingerprint_steps=1"], "comparison.fingerprint_steps cannot be combined"),
        (["--replicas.collective_timeout_seconds=100"], "must be below comm.train_timeout_seconds = 100"),
        (["--replicas.quorum_timeout_seconds=30"], "must be above replicas.collective_timeout_seconds = 30"),
    ],
)
def test_options_that_replicas_cannot_keep_are_rejected(options: list[str], message: str) -> None:
    config = parse([*REPLICA, *options])
    with patch.object(checks, "find_spec", lambda _: True), pytest.raises(ConfigError, match=message):
        checks.check_config(config, section_of(config, ReplicasConfig))


def test_a_missing_package_is_named() -> None:
    config = parse(REPLICA)
    with patch.object(checks, "find_spec", lambda _: None), pytest.raises(ConfigError, match=r"torchtrain\[elastic\]"):
        checks.check_config(config, section_of(config, ReplicasConfig))


def test_without_a_lighthouse_nothing_changes() -> None:
    assert TRAINERS["replicas"](JobConfig()) is None
    alone, tensor = Replicas(), torch.ones(2)
    alone.all_reduce(tensor)
    alone.vote()
    assert tensor.tolist() == [1, 1]
    assert not alone.connected


def test_the_id_is_that_of_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "4")
    assert ReplicasConfig().own_id == "4"
    assert ReplicasConfig(id="a").own_id == "a"


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("192.0.2.1", "replicas.host = '192.0.2.1' is not an address of the machine"),
        ("no.such.invalid", "replicas.host = 'no.such.invalid' is not known on the machine"),
    ],
)
def test_the_host_is_this_machine(host: str, message: str) -> None:
    checks.check_host("127.0.0.1")
    with pytest.raises(ConfigError, match=message):
        checks.check_host(host)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_state_and_sums_are_at_the_host_and_pass_no_proxy(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchft")
    from torchtrain.plugins.replicas.transport import StateTransport, SumGroup, in_url

    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    nothing_listens = f"{in_url(host)}:{free_port()}"
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://{nothing_listens}")
    monkeypatch.setattr("socket.gethostname", lambda: "nowhere.invalid")
    limit = timedelta(seconds=20)
    transport = StateTransport(host, limit)
    try:
        transport.send_checkpoint([1], 7, {"weight": torch.arange(3)}, limit)
        assert transport.recv_checkpoint(0, transport.metadata(), 7, limit)["weight"].tolist() == [0, 1, 2]
        url = re.escape(f"http://{nothing_listens}/7/full")
        with pytest.raises(StorageError, match=f"the state at {url} cannot be read: .*refused"):
            transport.recv_checkpoint(0, f"http://{nothing_listens}/", 7, limit)
    finally:
        transport.shutdown()
        transport._server.server_close()
    store, begun = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False), []
    groups = [SumGroup(host, limit, begun.append) for _ in range(2)]
    tensors = [torch.ones(2), torch.ones(2)]

    def add(number: int) -> None:
        groups[number].configure(f"{host}:{store.port}/quorum", "a", number, 2)
        groups[number].allreduce([tensors[number]], dist.AllreduceOptions()).wait()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(add, range(2)))
    assert [tensor.tolist() for tensor in tensors] == [[2, 2], [2, 2]]
    assert {*map(id, begun)} == {id(group.store) for group in groups}
    for group in groups:
        group.abort()


class Lighthouse:
    """Counts heartbeats."""

    beats = 0

    def heartbeat(self, replica: str) -> None:
        assert replica == "a"
        self.beats += 1

    def hears_within(self, seconds: float) -> bool:
        """Wait for the next heartbeat; returns whether it comes in time."""
        before, deadline = self.beats, time.monotonic() + seconds
        while self.beats == before and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.beats > before


@pytest.mark.parametrize(
    ("timed_out", "notices", "limit", "stops"),
    [
        (True, False, 60, True),  # one that hangs, for which the others have waited for so long
        (True, True, 60, False),  # it has heard of it, and will ask for another quorum
        (True, True, 0, True),  # but does not in that time
        (False, False, 60, False),  # a replica has died: one that computes has not heard of it
        (False, False, 0, True),
    ],
)
def test_the_heartbeat_stops_when_the_others_have_waited(
    timed_out: bool, notices: bool, limit: int, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("INTERVAL_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(f"torchtrain.plugins.replicas.heartbeat.{name}", 0.001)
    lighthouse, store = Lighthouse(), dist.HashStore()
    own, other = (Heartbeat(client, "a", limit) for client in (lighthouse, Lighthouse()))
    try:
        for heartbeat in (own, other):
            heartbeat.begin_step(store)
        if notices:
            own.notice_failure()
        other.discard_step(timed_out)
        deadline = time.monotonic() + 30
        if stops:
            while lighthouse.hears_within(0.5):
                assert time.monotonic() < deadline
        else:
            time.sleep(0.5)
            assert lighthouse.hears_within(30)
        own.discard_step(False)  # and asks for another quorum
        assert lighthouse.hears_within(30)
    finally:
        own.close()
        other.close()


def test_the_heartbeat_continues_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a validation and a save, for which the others wait until the join timeout of the lighthouse."""
    monkeypatch.setattr("torchtrain.plugins.replicas.heartbeat.POLL_SECONDS", 0.001)
    lighthouse, store = Lighthouse(), dist.HashStore()
    heartbeat = Heartbeat(lighthouse, "a", 0)
    heartbeat.begin_step(store)
    heartbeat.end_step()
    store.set("timed out", "")
    time.sleep(0.5)
    assert lighthouse.hears_within(30)
    heartbeat.close()


class Failing(Replicas):
    """Another replica adds ``other`` to each sum."""

    def __init__(self, other: torch.Tensor) -> None:
        self.other, self.failures = other, []  # type: ignore[var-annotated]

    def all_reduce(self, tensor: torch.Tensor, op: Any = None) -> None:  # noqa: ARG002
        tensor += self.other

    def fail(self, why: str) -> None:
        self.failures.append(why)


@pytest.mark.parametrize(("others", "is_right"), [([2, 3], True), ([1, 2, 3], False), ([3], False)])
def test_a_row_that_is_computed_twice_or_not_at_all_discards_the_step(others: list[int], is_right: bool) -> None:
    place = PlaceState.__new__(PlaceState)
    place.place = torch.zeros(4, 3, dtype=torch.int64)
    own = torch.tensor([[1, 5, 6], [1, 7, 8]])
    place.loader = SimpleNamespace(rows=range(2), state_dict=lambda: {"rows": own})  # type: ignore[assignment]
    place.mesh = SimpleNamespace(world=SimpleNamespace(get_local_rank=lambda _: 0))  # type: ignore[assignment]
    other = torch.zeros(4, 4, dtype=torch.int64)
    other[others] = torch.tensor([1, 1, 9, 9])
    replicas = Failing(other)
    with patch("torchtrain.plugins.replicas.place.all_reduce", lambda *_: None):
        after = place.next(replicas, None)  # type: ignore[arg-type]
    assert (replicas.failures == []) is is_right
    if is_right:
        assert after.tolist() == [[1, 5, 6], [1, 7, 8], [1, 9, 9], [1, 9, 9]]
    assert place.place.count_nonzero() == 0  # not before the vote


def write(folder: Path, *lines: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def steps(folder: Path) -> list[int | str]:
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line.get("event", line["step"]) for line in lines]


def start(step: int) -> dict[str, Any]:
    return {"step": step, "event": "start", "run": "a"}


def loss(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 1.0}


def test_the_files_of_replicas_are_one_curve(tmp_path: Path) -> None:
    first, second = tmp_path / "replicas/0", tmp_path / "replicas/1"
    write(second, start(0), loss(7))  # of an earlier start of the run

    def open_writers(step: int) -> Writers:
        return Writers(MetricsConfig(enable_tensorboard=True), tmp_path, "", step, "a", undone=False)

    files = [RunFiles(tmp_path, folder, open_writers, nothing) for folder in (first, second)]
    for of in files:
        of.begin_process()
    files[0].begin_run("a", resumed=False)
    write(first, start(0), loss(1), loss(2))
    write(second, start(1), loss(2), loss(3))
    files[0].update(leads=True)
    files[1].update(leads=False)
    assert steps(tmp_path) == ["start", 1, 2]
    # The first dies after step 3, which it has not copied any more; the second one takes over.
    write(second, loss(4))
    files[1].update(leads=True)
    assert steps(tmp_path) == ["start", 1, 2, 3, 4]
    write(second, {"step": 4, "event": "replica_left", "replica": "0"}, loss(5))
    files[1].update(leads=True)
    assert steps(tmp_path) == ["start", 1, 2, 3, 4, "replica_left", 5]
    # All die; the run resumes from a checkpoint of step 3, and the first one leads.
    again = RunFiles(tmp_path, first, open_writers, nothing)
    again.begin_process()
    again.begin_run("a", resumed=True)
    write(first, start(3), loss(4))
    again.update(leads=True)
    assert steps(tmp_path)[-2:] == ["start", 4]
    # The second one takes over: step 5 from before is undone, and comes again.
    files[1] = RunFiles(tmp_path, second, open_writers, nothing)
    files[1].begin_process()
    write(second, start(4), loss(5))
    files[1].update(leads=True)
    assert steps(tmp_path)[-3:] == ["start", 4, 5]
    # It leads in a rollback to step 3, and dies before it has written it; the first one takes over.
    undone = {"step": 3, "event": "rolled_back"}
    for folder in (first, second):
        write(folder, *([loss(5)] if folder == first else []), loss(6), {"step": 7, "event": "bad_step_rollback"})
    files[1].update(leads=True)
    again.update(leads=False)
    again.receive(b"".join(json.dumps(line).encode() + b"\n" for line in (loss(5), undone, loss(4))))
    write(first, {"step": 4, "event": "rolled_back"}, loss(5))
    again.update(leads=True)
    assert steps(tmp_path)[-7:] == [5, 6, "bad_step_rollback", "rolled_back", 4, "rolled_back", 5]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [of.step for of in board.Scalars("loss/average")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("changes_seed", "step", "undone"), [(True, 3, True), (True, 5, False), (False, 3, False)])
def test_the_writers_know_whether_steps_are_undone(changes_seed: bool, step: int, undone: bool, tmp_path: Path) -> None:
    """A run that resumes from step 3, or is taken over after step 5, with or without another seed than before."""
    from torchtrain.plugins.replicas.trainer import ReplicaTrainer

    config = parse([*REPLICA, *(["--training.seed", "7"] if changes_seed else [])])
    before = hash_of_changes(to_toml(parse(REPLICA)))
    write(tmp_path, {**start(0), "options": before}, *map(loss, range(1, 6)))
    trainer: Any = SimpleNamespace(
        config=config, config_toml=to_toml(config), folder_of_all=tmp_path, group=SimpleNamespace(run="a")
    )
    assert ReplicaTrainer.open_writers(trainer, step).contexts["metrics.jsonl"].undone == undone


@pytest.mark.slow
def test_lighthouse_that_does_not_answer_is_a_storage_error(tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    found = run_command(
        *("torchtrain.train", "--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder"),
        *(str(tmp_path / "run"), "--training.sums", "exact", "--training.global_batch_size", "16"),
        *("--replicas.lighthouse", address, "--replicas.id", "0", "--replicas.host", "127.0.0.1"),
        *("--replicas.collective_timeout_seconds", "3"),
    )
    assert found.returncode == StorageError.exit_code
    assert f"error: replicas.lighthouse = {address!r} does not answer: failed to connect" in found.stderr
