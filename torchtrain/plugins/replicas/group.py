"""The replicas of a run and their collectives, by torchft: who lives, replaceable groups, transfer of state."""

import logging
import os
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented

from torchtrain.config.run_plan import OtherStageError
from torchtrain.distributed.agreement import broadcast_from_rank0, gather_from_all_ranks
from torchtrain.distributed.process_group import all_reduce
from torchtrain.distributed.replicas import Replicas, StepDiscarded
from torchtrain.errors import ConfigError, StorageError, SupersededError, TorchtrainError
from torchtrain.logging import logger
from torchtrain.plugins.replicas.heartbeat import Heartbeat
from torchtrain.plugins.replicas.options import ReplicasConfig
from torchtrain.plugins.replicas.reasons import reason_of

NAME_BYTES = 16
WAIT_SECONDS = 1.0  # between two looks for more replicas
# More than a run has; torchft stores the progress as a signed integer of 64 bits.
STEPS = 1 << 30
ROLLBACKS = 1 << 12  # after one beginning
BEGINNINGS = 1 << 13
JOIN_ATTEMPTS = 3  # to take the state of a running replica, each of which makes the others wait
NEVER = timedelta(days=365)


@dataclass(frozen=True)
class Member:
    """What a replica tells the others at the beginning of a step."""

    present: int
    """1: a sum over replicas has another value if two of them see different members."""
    since: int
    """The first step that it has taken part in, if it has taken the state of another one; for those that begin, the
    step that was complete."""
    saved: int
    """The last step that it has saved; -1: none."""
    stopping: int
    """Whether it was asked to stop, and all others with it."""
    options: int
    """Hash of its config, apart from what may differ between replicas."""
    beginning: int
    """The newest beginning of the run that it knows, by notes: see ``ReplicaGroup.progress``."""
    is_alone: int
    """Whether it knows that no replica outside of this quorum has the state of the run and lives."""
    process: int
    """Higher for a process of the same replica that has started later."""
    state: int
    """Hash of the state on this rank, if it is to be compared; else 0."""
    id_hash: int
    """Of ``replicas.id``."""
    run: str
    """The id of the run."""
    name: str
    """``replicas.id``, shortened to ``NAME_BYTES``."""

    @staticmethod
    def of(row: Sequence[int]) -> "Member":
        """The member with this ``row``."""
        present, since, saved, stopping, options, beginning, is_alone, process, state, id_hash = row[:10]
        run = _bytes_of(row[10:12]).hex()
        name = _bytes_of(row[12:14]).rstrip(b"\0").decode(errors="replace")
        numbers = (present, since, saved, stopping, options, beginning, is_alone, process, state, id_hash)
        return Member(*numbers, run, name)

    @property
    def row(self) -> list[int]:
        """This member as integers, for a sum over replicas."""
        name = self.name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        numbers = [self.present, self.since, self.saved, self.stopping, self.options]
        numbers += [self.beginning, self.is_alone, self.process, self.state, self.id_hash]
        return [*numbers, *_integers_of(bytes.fromhex(self.run)), *_integers_of(name)]


def _integers_of(content: bytes) -> list[int]:
    return [int.from_bytes(half, "big", signed=True) for half in (content[:8], content[8:])]


def _bytes_of(integers: Sequence[int]) -> bytes:
    return b"".join(half.to_bytes(8, "big", signed=True) for half in integers)


class PinnedCopies:
    """Copies of tensors on a GPU in pinned memory, which is kept: one buffer for each shape and dtype."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self._copied_back: dict[tuple[torch.Size, torch.dtype], torch.cuda.Event] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor``, which the host waits for. It may be changed until the next copy of this shape."""
        key, stream = (tensor.shape, tensor.dtype), torch.cuda.current_stream()
        if key in self._copied_back:  # perhaps on another stream
            stream.wait_event(self._copied_back[key])
        else:
            self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._buffers[key].copy_(tensor, non_blocking=True)
        stream.synchronize()
        return self._buffers[key]

    def copy_back(self, tensor: Tensor) -> None:
        """Copy the last ``copy`` of this shape into ``tensor``. The host does not wait for it."""
        key = tensor.shape, tensor.dtype
        tensor.copy_(self._buffers[key], non_blocking=True)
        self._copied_back[key] = torch.cuda.current_stream().record_event()


class Quorum:
    """A torchft quorum whose id differs from those of earlier lighthouses, each of which begins with 1.

    With the same id as before, the manager would keep a group that has other members. With a new one, its members would
    find the addresses of an earlier group in the store, which lives as long as a replica.
    """

    def __init__(self, quorum: Any) -> None:
        self._quorum = quorum
        self.quorum_id = xxhash.xxh3_64_intdigest(f"{quorum.quorum_id} {quorum.replica_ids}".encode()) >> 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._quorum, name)


class RecordedQuorum:
    """A torchft ``ManagerClient`` that keeps the last quorum, of which the manager drops the ids."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.last: Any = None

    def _quorum(self, *arguments: Any, **options: Any) -> Quorum:
        self.last = quorum = Quorum(self._client._quorum(*arguments, **options))
        return quorum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class ReplicaGroup(Replicas):
    """This replica among the living ones. Every rank has one, which connects it with the ranks of the same number.

    Attributes:
        members: the members of the current step, by their number.
        number: the number of this replica among them.
    """

    connected = True

    def __init__(self, config: ReplicasConfig) -> None:
        self.config = config
        self.members: list[Member] = []
        self.number = 0
        self.has_joined = False
        """Whether the last ``begin`` has taken the state of another replica."""
        self.since = 0
        self.is_stopping: Callable[[], bool] = lambda: False
        """Whether all replicas are to stop."""
        self.must_stop: Callable[[], bool] = lambda: False
        """Whether this one is to stop."""
        self.stop_all: Callable[[], None] = lambda: None
        self.hash_of_state: Callable[[int], int] = lambda _: 0
        """Returns ``Member.state`` after this step."""
        self.last_saved = -1
        self.beginning = 0
        """``Member.beginning``"""
        self.is_alone = False
        """``Member.is_alone``"""
        self.process = 0
        """``Member.process``"""
        self._id_hash = xxhash.xxh3_64_intdigest(config.own_id.encode()) >> 1
        self._is_superseded = False
        self.heard_at = 0.0
        """When all members were last heard of, in ``time.monotonic()`` seconds."""
        self.is_rolling_back = False
        """Whether a state that is taken is that of a rollback: then this replica has not joined by it."""
        self.discarded = 0
        self._failed_joins = 0  # in a row
        self._why_not_joined = ""
        self._met: set[str] = set()  # the ids of those who have last met, of the starts of replicas
        self._has_loaded = False  # by the last quorum
        self._heartbeat: Heartbeat | None = None  # of rank 0
        self._manager: Any = None
        self._pg: Any = None
        self._pinned = PinnedCopies()

    def connect(
        self,
        state: Callable[[], Mapping[str, Tensor]],
        load: Callable[[Mapping[str, Tensor]], None],
        *,
        run: str,
        stage: int,
        end_of_stage: Callable[[int], int],
        options: int,
        group: dist.ProcessGroup,
    ) -> None:
        """Register this replica at the lighthouse. Collective in the replica.

        Args:
            state: returns this rank's part of all state, for a replica that joins.
            load: loads what ``state`` returns on the rank of the same number of another replica.
            run: the id of the run, 32 hexadecimal digits.
            stage: the number of the stage of the run, from 0.
            end_of_stage: returns the last step of the stage with a number.
            options: see ``Member``.
            group: a gloo group of all ranks of this replica.
        """
        # torchft logs each step, and tracebacks of errors that are reported here; it warns of what is missing on CPUs
        # and of a buffer that is only read.
        os.environ.setdefault("RUST_LOG", "warn")
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        from torchtrain.plugins.replicas.transport import SumGroup

        def loaded(values: Mapping[str, Tensor]) -> None:
            if self.progress[0] == self._stage:
                load(values)
            self._has_loaded = True

        config = self.config
        self.run, self.options, self._group = run, options, group
        self._stage, self._end_of_stage = stage, end_of_stage
        host = broadcast_from_rank0(lambda: config.host or socket.gethostname(), group)
        # A store of its own: that of torchrun outlives the ranks, and would have the addresses of dead ones.
        self._store: Any = None

        def start_store() -> int:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            return int(self._store.port)

        port = broadcast_from_rank0(start_store, group)
        timeout = timedelta(seconds=config.collective_timeout_seconds)
        self._pg = SumGroup(config.host, timeout, self._begin_quorum, lambda: self._client.last.max_step)
        try:
            self._manager = self._build_manager(loaded, state, host, port)
        except Exception as error:  # torchft has no error of its own
            why = str(error).splitlines()[0]
            raise StorageError(f"replicas.lighthouse = {config.lighthouse!r} does not answer: {why}") from error
        self._client = self._manager._client = RecordedQuorum(self._manager._client)
        self._met = set()
        self.progress = stage, 0, 0, 0

    def _build_manager(
        self, loaded: Callable[..., None], state: Callable[[], Mapping[str, Tensor]], host: str, port: int
    ) -> Any:
        from torchft import Manager
        from torchft.coordination import LighthouseClient
        from torchft.manager import REPLICA_ID_KEY

        from torchtrain.plugins.replicas.transport import StateTransport, in_url

        config, timeout = self.config, timedelta(seconds=self.config.collective_timeout_seconds)
        manager = Manager(
            pg=self._pg,
            load_state_dict=loaded,
            state_dict=lambda: dict(state()),
            min_replica_size=config.min,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=config.quorum_timeout_seconds),
            connect_timeout=timeout,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            store_addr=host,
            store_port=port,
            lighthouse_addr=config.lighthouse,
            replica_id=config.own_id,
            hostname=in_url(host),
            checkpoint_transport=StateTransport(config.host or socket.gethostname(), timeout),
            heartbeat_interval=NEVER,  # see ``Heartbeat``
            init_sync=False,  # all begin with the same weights, by the seed
            quorum_retries=config.lighthouse_retries,
        )
        if dist.get_rank() == 0:
            name = self._store.get(REPLICA_ID_KEY).decode()
            client = LighthouseClient(config.lighthouse, timeout)
            self._heartbeat = Heartbeat(client, name, config.collective_timeout_seconds)
        return manager

    @property
    def progress(self) -> tuple[int, int, int, int]:
        """Part of the run, beginning of the run, rollbacks since then, and steps that are complete.

        The replicas compare it as one number: who is behind takes the state of another. Each time that the run begins,
        or resumes from a checkpoint, because no replica lives that has its state, that gets a higher number. A replica
        that only seemed dead, and is ahead, then takes the state of the others, as they do not have its steps in the
        run's files. 0: this replica has no state of the run yet.
        """
        before_step, step = divmod(int(self._manager.current_step()), STEPS)
        before_rollbacks, rollbacks = divmod(before_step, ROLLBACKS)
        return *divmod(before_rollbacks, BEGINNINGS), rollbacks, step

    @progress.setter
    def progress(self, progress: tuple[int, int, int, int]) -> None:
        stage, beginning, rollbacks, step = progress
        assert max(beginning // BEGINNINGS, rollbacks // ROLLBACKS, step // STEPS) == 0, progress
        number = ((stage * BEGINNINGS + beginning) * ROLLBACKS + rollbacks) * STEPS + step
        self._manager.load_state_dict({"step": number, "batches_committed": 0})

    @property
    def step(self) -> int:
        """The steps that are complete."""
        return self.progress[3]

    @property
    def size(self) -> int:
        """The number of living replicas."""
        return len(self.members)

    @property
    def by_age(self) -> list[int]:
        """The numbers of the members; first those that have been members for longer."""
        return sorted(range(self.size), key=lambda number: (self.members[number].since, number))

    @property
    def leader(self) -> int:
        """The number of the replica that writes the run's files: the one that has been a member for the longest."""
        return self.by_age[0]

    @property
    def is_leader(self) -> bool:
        return self.leader == self.number

    @property
    def has_left(self) -> bool:
        """Whether this replica is no longer a member, or not yet."""
        return self._manager is None

    @property
    def failed(self) -> bool:
        """Whether a collective of this step has failed on this rank."""
        return self._manager.errored() is not None

    def begin(self, at_least: int = 1) -> bool:
        """Agree on the living replicas; if this one is behind another, take its state. Collective.

        Args:
            at_least: wait until there are so many.

        Returns:
            False if a rank of this replica was asked to stop while it waited.

        Raises:
            StorageError: the lighthouse does not answer, or the other replicas do not come.
            OtherStageError: another one is in a later stage of the run.
            SupersededError: another process of this replica has started later.
        """
        self._agree()
        has_joined = self.has_joined
        if self.size < at_least:
            logger.info("replicas: %d of at least %d (replicas.min); waits for more", self.size, at_least)
        while self.size < at_least and not self._must_stop():
            time.sleep(WAIT_SECONDS)
            self._agree()
            has_joined = has_joined or self.has_joined
        self.has_joined = has_joined
        return self.size >= at_least

    def _must_stop(self) -> bool:
        """Whether a rank of this replica was asked to stop. Collective in the replica."""
        must_stop = torch.tensor(self.must_stop(), dtype=torch.int64)
        all_reduce(must_stop, self._group, dist.ReduceOp.MAX)
        return bool(must_stop)

    def _agree(self) -> None:
        """``begin``, with any number of replicas."""
        self.has_joined = is_torn = False
        while True:
            self._has_loaded = self._pg.timed_out = False
            self._why_not_joined = ""
            self._start_quorum()
            if not self.failed:
                self._begin_quorum(self._pg.store)
                self._meet()
            self.has_joined = self.has_joined or self._has_loaded
            flags = torch.tensor([self.failed, not self._has_loaded, self._is_superseded], dtype=torch.int64)
            first, last = torch.tensor([self.progress] * 2, dtype=torch.int64)
            all_reduce(flags, self._group, dist.ReduceOp.MAX)
            all_reduce(first, self._group, dist.ReduceOp.MIN)
            all_reduce(last, self._group, dist.ReduceOp.MAX)
            failed, some_not_loaded, is_superseded = flags.tolist()
            if is_superseded:
                raise SupersededError(
                    f"another process of the replica {self.config.own_id!r} has started later and takes its place: "
                    "this one ends. Each replica needs a name of its own (replicas.id)"
                )
            stage = int(last[0])
            if stage > self._stage:
                raise OtherStageError(self._end_of_stage(stage - 1))
            if not torch.equal(first, last):
                # Only some ranks have got the state of another replica: it is asked for again. What this one has now is
                # the state of no step, which nobody may take.
                is_torn, failed = True, True
                self.progress, self.is_alone = (self._stage, 0, 0, 0), False
            elif not (is_torn and some_not_loaded):
                is_torn = False
            elif not failed:
                raise StorageError(
                    "the replica whose state this one was taking has died, and this one has a part of it"
                )
            if not failed:
                self.since, self.heard_at = self._own_since, time.monotonic()
                self._failed_joins, self._met = 0, {*self._client.last.replica_ids}
                self._adopt()
                return
            self.fail("the members could not be connected; they are asked for again")
            self._manager.should_commit()
            self._discard()
            self._count_failed_meeting()

    def _begin_quorum(self, store: Any) -> None:
        """The others may wait for this replica from now on."""
        if self._heartbeat is not None:
            self._heartbeat.begin_step(store)

    def _start_quorum(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.end_step()
        try:
            self._manager.start_quorum()
            if self.failed:
                self._why_not_joined = self._reason()
                logger.warning("replicas: %s", self._why_not_joined)
        except TorchtrainError:  # by ``load``
            raise
        except Exception as error:  # torchft has no error of its own
            raise StorageError(
                f"no quorum of replicas in {self.config.quorum_timeout_seconds} s (replicas.quorum_timeout_seconds) "
                f"from the lighthouse {self.config.lighthouse}: {str(error).splitlines()[0]}"
            ) from error

    def _reason(self) -> str:
        """Why this rank is not connected with the others, or has not taken or sent a state."""
        error, quorum = self._manager.errored().original_exception, self._client.last
        if isinstance(error, StorageError):  # by ``transport``
            return str(error)
        why = reason_of(error)
        if quorum.heal:
            return f"the replica at {quorum.recover_src_manager_address} does not answer: {why}"
        return f"the state for a replica that joins cannot be sent: {why}"

    def _count_failed_meeting(self) -> None:
        """Count an attempt to meet, unless it failed because of replicas that join. Collective in the replica.

        Raises:
            StorageError: it was one too many, or this replica cannot join those that run.
        """
        quorum = self._client.last
        if quorum.heal:
            reasons = gather_from_all_ranks(lambda: self._why_not_joined, self._group)
            if any(reasons):
                self._count_failed_join(reasons)
                return
        has_new = not self._met.issuperset(quorum.replica_ids)
        if not (self._met and has_new):
            self._count_discarded()

    def _count_failed_join(self, reasons: Sequence[str]) -> None:
        self._failed_joins += 1
        if self._failed_joins < JOIN_ATTEMPTS:
            return
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        raise StorageError(
            f"rank {rank} of this replica has not reached the others in {JOIN_ATTEMPTS} attempts, and they continue "
            f"without it: {reason}. On each machine set replicas.host to an address at which the others reach it, and "
            "allow TCP on all ports"
        )

    def _meet(self) -> None:
        """Exchange what a ``Member`` is."""
        self.number, size = self._manager.participating_rank() or 0, self._manager.num_participants()
        own = Member(
            present=1,
            since=self._own_since,
            saved=self.last_saved,
            stopping=int(self.is_stopping()),
            options=self.options,
            beginning=self.beginning,
            is_alone=int(self.is_alone),
            process=self.process,
            state=self.hash_of_state(self.step),
            id_hash=self._id_hash,
            run=self.run,
            name=self.config.own_id,
        )
        table = torch.zeros(size, len(own.row), dtype=torch.int64)
        table[self.number] = torch.tensor(own.row)
        self.all_reduce(table)
        self.members = [Member.of(row) for row in table.tolist()]
        if any(member.present != 1 for member in self.members):
            self.fail("the replicas see different members")
            return
        newest: dict[int, int] = {}
        for member in self.members:
            newest[member.id_hash] = max(member.process, newest.get(member.id_hash, 0))
        older = [member for member in self.members if member.process < newest[member.id_hash]]
        if older:
            self._is_superseded = self.process < newest[self._id_hash]
            self.fail(f"there are two processes of the replica {older[0].name!r}: the one that started first leaves")

    @property
    def _own_since(self) -> int:
        has_joined = (self.has_joined or self._has_loaded) and not self.is_rolling_back
        return self.step + 1 if has_joined else self.since

    def _adopt(self) -> None:
        """Take over what the members have agreed on."""
        leader = self.members[self.leader]
        self.require_options(leader.options)
        self.run = leader.run
        self.beginning = max(member.beginning for member in self.members)
        if any(member.stopping for member in self.members):
            self.stop_all()

    def other_states(self) -> tuple[list[int], bool]:
        """Compare the states of the members. Collective in the replica.

        Returns the numbers of the members whose state differs, on any rank, from that of most members, and True; or the
        numbers of all members and False, if they differ, and no state is that of most.
        """
        states = [member.state for member in self.members]
        usual, count = Counter(states).most_common(1)[0]
        is_known = 2 * count > self.size
        differ = torch.tensor([not is_known or state != usual for state in states], dtype=torch.int64)
        all_reduce(differ, self._group, dist.ReduceOp.MAX)
        unknown = torch.tensor(not is_known, dtype=torch.int64)
        all_reduce(unknown, self._group, dist.ReduceOp.MAX)
        return differ.nonzero().flatten().tolist(), not bool(unknown)

    def require_options(self, of_others: int) -> None:
        """Raise ConfigError unless the options of this replica are those of a running one, by their hash."""
        if of_others != self.options:
            raise ConfigError(
                "this replica has other options than those that run: all replicas need the same config, apart from "
                "[replicas], and the same number of ranks"
            )

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if self.failed or self._manager.num_participants() == 1:
            return
        options = dist.AllreduceOptions()
        options.reduceOp = op
        # gloo, also for tensors on GPUs: aborting a communicator of NCCL may hang.
        on_host = self._pinned.copy(tensor) if tensor.is_cuda else tensor
        began = time.monotonic()
        try:
            self._pg.allreduce([on_host], options).wait()
        except Exception as error:
            why = f"has left: {reason_of(error)}"
            if self._pg.has_passed(began):
                self._pg.timed_out = True
                limit = self.config.collective_timeout_seconds
                why = f"lets the others wait for {limit} s (replicas.collective_timeout_seconds)"
            self.fail(f"a replica {why}")
            return
        if on_host is not tensor:
            self._pinned.copy_back(tensor)

    def sum_loss(self, loss: Any) -> Any:
        # In float64 the sums of losses and of numbers of tokens are exact (``exact_nats``).
        sums = torch.stack([torch.zeros_like(loss[0]) if part is None else part.double() for part in loss])
        self.all_reduce(sums)
        parts = zip(sums.unbind(), loss, strict=True)
        return type(loss)(*(None if part is None else total.to(part.dtype) for total, part in parts))

    def fail(self, why: str) -> None:
        """Discard this step."""
        if not self.failed:
            logger.warning("replicas: %s", why)
            self._manager.report_error(RuntimeError(why))
        if self._heartbeat is not None:
            self._heartbeat.notice_failure()
        # Closes this rank's connections, so that other replicas do not wait for it until the timeout.
        self._pg.abort()

    def vote(self) -> None:
        # It is complete only when all replicas have come here: then none of their hooks has raised an error.
        self.all_reduce(torch.zeros(1))
        if self.size > 1:
            self.heard_at = time.monotonic()
        if self._manager.should_commit():
            self.discarded = 0
            if self._heartbeat is not None:
                self._heartbeat.end_step()
            return
        self._discard()
        self._count_discarded()
        raise StepDiscarded

    def _discard(self) -> None:
        """Tell the other replicas that this one no longer waits for them. Collective in the replica."""
        timed_out = torch.tensor(self._pg.timed_out, dtype=torch.int64)
        all_reduce(timed_out, self._group, dist.ReduceOp.MAX)
        if self._heartbeat is not None:
            self._heartbeat.discard_step(bool(timed_out))

    def _count_discarded(self) -> None:
        self.discarded += 1
        if self.discarded > self.config.max_discarded:
            raise StorageError(
                f"{self.discarded} attempts of step {self.step + 1} in a row were discarded (replicas.max_discarded = "
                f"{self.config.max_discarded}): replicas die again and again, or do not reach each other"
            )

    def close(self) -> None:
        """Leave: the others no longer wait for this replica."""
        if self.has_left:
            return
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._manager.shutdown(wait=False)
        # With wait=False the server of torchft 0.2 continues, and keeps the last state that was sent.
        transport = self._manager._checkpoint_transport
        transport._state_dict = None

        def end_server() -> None:
            transport._server.shutdown()
            transport._server.server_close()

        threading.Thread(target=end_server, daemon=True).start()
        self._pg.abort()
        self._manager = None
