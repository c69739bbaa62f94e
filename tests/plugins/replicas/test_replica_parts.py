"""The parts of a replica that need no other replica: rows, options, the run's files."""

import json
import re
import socket
import time
from collections.abc import Iterator
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

from torchtrain.checkpoint.local_storage import LocalStorage
from torchtrain.checkpoint.resume_compatibility import hash_of_changes
from torchtrain.config.parse import parse, to_toml
from torchtrain.config.schema import section_of
from torchtrain.distributed.replicas import Replicas
from torchtrain.errors import ConfigError, StoppedError, StorageError
from torchtrain.metrics.options import MetricsConfig
from torchtrain.metrics.writers import Writers
from torchtrain.plugins.replicas import checks, presence
from torchtrain.plugins.replicas.files import RunFiles, parsed
from torchtrain.plugins.replicas.group import Member, Quorum, ReplicaGroup, reason_of
from torchtrain.plugins.replicas.heartbeat import Heartbeat
from torchtrain.plugins.replicas.options import ReplicasConfig
from torchtrain.plugins.replicas.place import PlaceState
from torchtrain.plugins.replicas.presence import DEAD_SECONDS, Presence
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
    member = Member(1, 12, -1, 0, 2**63 - 1, 3, 1, 2**62, -(2**63), 5, "f" * 16 + "0123456789abcdef", "replica-3")
    assert Member.of(torch.tensor(member.row).tolist()) == member
    assert Member.of(replace(member, name="a very long name of a replica").row).name == "a very long name"


class Exchange(ReplicaGroup):
    """A replica in a quorum with ``others``, which needs no torchft."""

    def __init__(self, own_id: str, *others: Member, process: int = 1) -> None:
        super().__init__(ReplicasConfig(id=own_id))
        self.others, self.process, self.run, self.options, self.why = others, process, "0" * 32, 0, ""
        self._manager = SimpleNamespace(
            participating_rank=lambda: len(others),
            num_participants=lambda: len(others) + 1,
            current_step=lambda: self.number_of_progress,
            load_state_dict=lambda state: setattr(self, "number_of_progress", state["step"]),
        )
        self.progress = 0, 0, 0, 0

    failed = False

    def all_reduce(self, tensor: torch.Tensor, op: Any = None) -> None:  # noqa: ARG002
        for number, member in enumerate(self.others):
            tensor[number] += torch.tensor(member.row)

    def fail(self, why: str) -> None:
        self.why = why

    def member(self) -> Member:
        self._meet()
        return self.members[-1]


def test_of_two_processes_of_one_replica_the_one_that_started_first_leaves() -> None:
    newer, other = Exchange("a long name of replica 10", process=2).member(), Exchange("b", process=9).member()
    older = Exchange("a long name of replica 10", newer, other)
    older._meet()
    assert older._is_superseded
    assert older.why.startswith("there are two processes of the replica 'a long name of r'")
    # The others discard what they have exchanged with both.
    for name, process in (("a long name of replica 10", 3), ("b", 9)):
        group = Exchange(name, Exchange("a long name of replica 10").member(), newer, process=process)
        group._meet()
        assert not group._is_superseded
        assert group.why.startswith("there are two processes")
    other_replica = Exchange("a long name of replica 11", newer, other)  # another one, with the same short name
    other_replica._meet()
    assert (other_replica._is_superseded, other_replica.why) == (False, "")


def test_a_later_beginning_of_the_run_counts_more_than_steps() -> None:
    group = Exchange("0")
    numbers = []
    for progress in ((0, 0, 0, 0), (0, 1, 0, 9), (0, 1, 1, 5), (0, 2, 0, 5), (1, 0, 0, 0), (1, 3, 4095, 2**30 - 1)):
        group.progress = progress
        assert group.progress == progress
        numbers.append(group.number_of_progress)
    assert numbers == sorted(numbers)
    group.progress = (255, 2**13 - 1, 2**12 - 1, 2**30 - 1)
    assert group.number_of_progress == 2**63 - 1


def test_an_error_of_gloo_is_a_reason_without_its_source_code() -> None:
    text = (
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:8334. This is typically caused by a remote worker crashing. Check the logs of the remote worker "
        "before reporting an error. GLHF! "
    )
    assert reason_of(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:8334"
    assert reason_of(RuntimeError("Timed out\nmore")) == "Timed out"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return 1_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(presence, "time", clock)
    monkeypatch.setattr(presence, "BEAT_SECONDS", 3600)
    return clock


def test_a_replica_lives_while_its_note_changes(tmp_path: Path, clock: Clock) -> None:
    storage = LocalStorage(str(tmp_path))
    first, second = Presence(storage, "0", 0), Presence(storage, "1", 0)
    assert first.others() == second.others() == []  # nobody has a state
    first.begin(4)
    assert (second.others(), second.beginning) == (["0"], 4)
    clock.now += DEAD_SECONDS - 1
    first._write(lives=True)
    assert second.others() == ["0"]
    clock.now += DEAD_SECONDS - 1
    assert second.others() == ["0"]
    assert Presence(storage, "2", 0).others() == ["0"]  # not known yet
    clock.now += 1
    assert second.others() == []
    first._write(lives=True)  # it was suspended
    assert second.others() == ["0"]
    assert Presence(storage, "1", 1).others() == []  # it trains an earlier part
    second.begin(5)
    assert first.others() == ["1"]
    first.close()
    assert second.others() == []
    assert Presence(storage, "0", 0).beginning == 5


def test_notes_of_earlier_processes(tmp_path: Path, clock: Clock) -> None:
    storage = LocalStorage(str(tmp_path))
    first = Presence(storage, "0", 0)
    first.begin(2)
    second = Presence(storage, "0", 0)
    assert second.process > first.process  # although the clock stands
    assert second.others() == ["0"]  # its ranks may live
    second.begin(2)
    clock.now += 2 * DEAD_SECONDS
    second.others()
    second._delete_earlier()
    assert list(storage.read_notes()) == [f"0.{second.process}"]
    (tmp_path / "notes/torn").write_bytes(b'{"id": "9", "pro')
    (tmp_path / "notes/other").write_bytes(b'{"id": "9", "process": 1, "beginning": 1e99, "lives": true}')
    assert Presence(storage, "1", 0).others() == ["0"]


def replica_that_starts(storage: LocalStorage, *outcomes: str) -> Any:
    """A trainer that has nothing but who lives; ``outcomes`` of each agreement: "joined", "alone", or "others know"."""
    remaining = list(outcomes)
    group = SimpleNamespace(has_joined=False, members=[], is_alone=False, beginning=0)

    def begin() -> None:
        outcome = remaining.pop(0)
        group.has_joined = outcome == "joined"
        group.members = [SimpleNamespace(is_alone=group.is_alone), SimpleNamespace(is_alone=outcome == "others know")]

    group.begin = begin
    trainer = SimpleNamespace(group=group, presence=Presence(storage, "1", 0), storage=storage, gloo_group=None)
    trainer.stop = SimpleNamespace(agree=lambda _: False)
    trainer.replica_config = ReplicasConfig(lighthouse="http://host:29510")
    return trainer


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Clock:
    from torchtrain.plugins.replicas import trainer

    monkeypatch.setattr(trainer, "broadcast_from_rank0", lambda function, _: function())
    monkeypatch.setattr(trainer, "time", clock)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)  # type: ignore[attr-defined]
    return clock


def test_a_start_without_the_lighthouse_waits_for_replicas_that_live(tmp_path: Path, one_rank: Clock) -> None:
    from torchtrain.plugins.replicas.trainer import ReplicaTrainer

    storage = LocalStorage(str(tmp_path))
    other = Presence(storage, "0", 0)
    assert not ReplicaTrainer.joins(replica_that_starts(storage, "alone"))
    other.begin(3)
    assert ReplicaTrainer.joins(replica_that_starts(storage, "alone", "alone", "joined"))
    assert one_rank.now == 2
    trainer = replica_that_starts(storage, "alone", "others know")
    assert not ReplicaTrainer.joins(trainer)
    assert trainer.group.beginning == 3  # the next one is the fourth
    # It is dead.
    assert not ReplicaTrainer.joins(replica_that_starts(storage, *["alone"] * 20))
    assert one_rank.now == 3 + DEAD_SECONDS

    def beats() -> None:
        one_rank.now += 1
        other._write(lives=True)

    trainer = replica_that_starts(storage, *["alone"] * 1000)
    trainer.stop.agree = lambda _: beats()
    with pytest.raises(StorageError, match=r"the replicas 0 train, by their notes .* http://host:29510 has not known"):
        ReplicaTrainer.joins(trainer)
    trainer = replica_that_starts(storage, *["alone"] * 9)
    trainer.stop.agree = lambda _: True
    with pytest.raises(StoppedError, match="asked to stop while waiting for the replicas 0"):
        ReplicaTrainer.joins(trainer)


@pytest.mark.parametrize(
    ("group", "events"),
    [
        ((0, 1, 0, 9), []),
        ((0, 1, 0, 12), ["restart 12"]),
        ((0, 1, 1, 5), ["undo 5"]),
        ((0, 2, 0, 5), ["5 start a", "hooks undo 5", "restart 5"]),
    ],
)
def test_steps_that_others_begin_again_are_no_rollback(group: tuple[int, ...], events: list[str]) -> None:
    """In its own metrics: else it would add a rollback to those of the run when it leads later."""
    from torchtrain.plugins.replicas.trainer import ReplicaTrainer

    found: list[str] = []
    metrics = SimpleNamespace(
        options="",
        restart=lambda step: found.append(f"restart {step}"),
        undo=lambda step: found.append(f"undo {step}"),
        record_event=lambda step, event, values: found.append(f"{step} {event} {values['run']}"),
    )
    trainer: Any = SimpleNamespace(
        step=9,
        _beginning=1,
        group=SimpleNamespace(step=group[3], progress=group, run="a"),
        step_check=SimpleNamespace(reset=lambda: None),
        metrics=metrics,
        hooks=SimpleNamespace(undo=lambda step: found.append(f"hooks undo {step}")),
    )
    ReplicaTrainer.follow_progress(trainer)
    ReplicaTrainer.follow_progress(trainer)
    assert (trainer.step, found) == (group[3], events)


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
    with patch.object(checks, "find_spec", lambda _: None), pytest.raises(ConfigError, match="pip install 'torchft"):
        checks.check_config(config, section_of(config, ReplicasConfig))


def test_without_a_lighthouse_nothing_changes() -> None:
    assert ReplicasConfig().trainer_class == ""
    alone, tensor = Replicas(), torch.ones(2)
    alone.all_reduce(tensor)
    alone.vote()
    assert tensor.tolist() == [1, 1]
    assert not alone.connected


def test_the_id_is_that_of_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "4")
    assert ReplicasConfig().own_id == "4"
    assert ReplicasConfig(id="a").own_id == "a"


def test_the_host_is_this_machine() -> None:
    checks.check_host("127.0.0.1")
    with pytest.raises(ConfigError, match=r"replicas.host = '192.0.2.1' is not an address of the machine"):
        checks.check_host("192.0.2.1")
    for code, kind in ((socket.EAI_NONAME, ConfigError), (socket.EAI_AGAIN, StorageError)):
        unknown = socket.gaierror(code, "no answer")
        with (
            patch("socket.getaddrinfo", side_effect=unknown),
            pytest.raises(kind, match=r"replicas.host = 'pod' is not known on the machine .* \(no answer\)"),
        ):
            checks.check_host("pod")


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
    groups = [SumGroup(host, limit, begun.append, lambda: 7) for _ in range(2)]
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


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_group_does_not_connect_to_an_earlier_one_of_another_lighthouse() -> None:
    """It has the same id and store. Member 0 connects before member 1 has replaced its address in the store."""
    pytest.importorskip("torchft")
    from torchtrain.plugins.replicas.transport import SumGroup

    host, limit = "127.0.0.1", timedelta(seconds=5)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    for step in (7, 8):
        groups = [SumGroup(host, limit, lambda _: None, lambda step=step: step) for _ in range(2)]

        def add(number: int, groups: list[SumGroup] = groups) -> list[float]:
            time.sleep(number)
            groups[number].configure(f"{host}:{store.port}/torchft/1/0", "a", number, 2)
            ones = torch.ones(2)
            groups[number].allreduce([ones], dist.AllreduceOptions()).wait()
            return ones.tolist()

        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(add, range(2))) == [[2, 2], [2, 2]]
        for group in groups:
            group.abort()


def test_a_group_whose_store_has_died_is_an_error_before_the_timeout() -> None:
    """If all replicas die and return at once, the lighthouse first names the members that have died."""
    transport = pytest.importorskip("torchtrain.plugins.replicas.transport")
    group = transport.SumGroup("127.0.0.1", timedelta(seconds=6), lambda _: None, lambda: 7)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(StorageError, match=f"no connection with all members, which meet at {address}: .*refused"):
        group.configure(f"{address}/torchft/1/0", "a", 0, 2)
    assert not group.timed_out


def test_the_id_of_a_quorum_depends_on_its_members() -> None:
    """Else the manager keeps the group of an earlier lighthouse, which began to count as the next one does."""
    ids = [
        Quorum(SimpleNamespace(quorum_id=number, replica_ids=of)).quorum_id for number, of in ((1, ["a"]), (1, ["b"]))
    ]
    again = Quorum(SimpleNamespace(quorum_id=1, replica_ids=["a"], heal=True))
    assert ids[0] != ids[1]
    assert (again.quorum_id, again.heal) == (ids[0], True)


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


def test_a_line_that_a_replaced_process_writes_late_is_not_copied(tmp_path: Path) -> None:
    own = tmp_path / "replicas/0"

    def open_writers(step: int) -> Writers:
        return Writers(MetricsConfig(enable_tensorboard=False), tmp_path, "", step, "a", undone=False)

    files = RunFiles(tmp_path, own, open_writers, nothing)
    files.begin_process()
    files.begin_run("a", resumed=False)
    write(own, start(0), loss(1), loss(2), {"step": 2, "validation_loss": 1.0}, loss(1), loss(2), loss(3))
    files.update(leads=True)
    assert steps(tmp_path) == ["start", 1, 2, 2, 3]
    write(own, {"step": 1, "event": "rolled_back"}, loss(2), loss(3), loss(3))
    files.update(leads=True)
    assert steps(tmp_path) == ["start", 1, 2, 2, 3, "rolled_back", 2, 3]
    # A replica that takes over knows the last line, too.
    second = RunFiles(tmp_path, tmp_path / "replicas/1", open_writers, nothing)
    second.begin_process()
    write(tmp_path / "replicas/1", loss(4))
    second.update(leads=True)
    write(tmp_path / "replicas/1", loss(3), loss(4), loss(5))
    second.update(leads=True)
    assert steps(tmp_path)[-3:] == [3, 4, 5]


@pytest.mark.parametrize("leads_again", [False, True])
def test_a_leader_that_is_suspended_while_it_writes_lines(
    leads_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica takes over when the first one has read its line of step 2, and before it writes it."""
    own = [tmp_path / "replicas/0", tmp_path / "replicas/1"]

    def open_writers(step: int) -> Writers:
        return Writers(MetricsConfig(enable_tensorboard=False), tmp_path, "", step, "a", undone=False)

    first, second = (RunFiles(tmp_path, folder, open_writers, nothing) for folder in own)
    for of in (first, second):
        of.begin_process()
    first.begin_run("a", resumed=False)
    write(own[0], start(0), loss(1))
    first.update(leads=True)

    def take_over_then_parse(content: bytes) -> Iterator[dict[str, Any]]:
        monkeypatch.undo()
        second.update(leads=True)
        yield from parsed(content)

    write(own[1], loss(1), loss(2), loss(3))
    write(own[0], loss(2), {"step": 2, "event": "replica_joined", "replica": "1"})
    monkeypatch.setattr("torchtrain.plugins.replicas.files.parsed", take_over_then_parse)
    first.update(leads=True)
    assert steps(tmp_path) == ["start", 1, 2, 3]
    first.update(leads=leads_again)
    write(own[0], loss(3), loss(4))
    first.update(leads=leads_again)
    first.end()
    assert steps(tmp_path) == ["start", 1, 2, 3, *(["replica_joined", 4] if leads_again else [])]


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
