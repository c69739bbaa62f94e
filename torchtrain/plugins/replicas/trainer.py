"""The trainer of a replica: it takes each step together with the replicas that live, and repeats a discarded one."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from torchtrain.checkpoint.resume_compatibility import hash_of_changes
from torchtrain.checkpoint.states import flatten
from torchtrain.config.parse import to_toml
from torchtrain.config.run_plan import OtherStageError
from torchtrain.config.schema import JobConfig, section_of
from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.agreement import Request, broadcast_from_rank0, on_rank0
from torchtrain.distributed.mesh import local
from torchtrain.distributed.process_group import all_reduce, rank, world_size
from torchtrain.distributed.replicas import Replicas, StepDiscarded
from torchtrain.errors import CheckpointError, HardwareError, StoppedError, StorageError, SupersededError
from torchtrain.fault_tolerance.stop_request import StopRequest
from torchtrain.logging import BestEffort, logger
from torchtrain.metrics.hooks import Hook
from torchtrain.metrics.recorder import MetricsRecorder
from torchtrain.metrics.writers import Writers, changes_steps
from torchtrain.models.loss import TokenLoss
from torchtrain.parallelisms.fsdp import fsdp_modules
from torchtrain.plugins.recheck.hashes import TensorHash, combine, read
from torchtrain.plugins.recheck.options import RecheckConfig
from torchtrain.plugins.replicas.checks import check_config
from torchtrain.plugins.replicas.files import RunFiles
from torchtrain.plugins.replicas.group import WAIT_SECONDS, ReplicaGroup
from torchtrain.plugins.replicas.options import ReplicasConfig
from torchtrain.plugins.replicas.place import PlaceState
from torchtrain.plugins.replicas.presence import DEAD_SECONDS, Presence
from torchtrain.plugins.replicas.rows import rows_of
from torchtrain.trainer import Trainer

HANG_SECONDS = 0.5
"""The others drop a replica only after a longer time (the heartbeat timeout of the lighthouse)."""
OPTIONS, PLACE_SIZES, LINES = "replicas.options", "replicas.place_sizes", "replicas.lines"


class ReplicaTrainer(Trainer):
    """Trains as ``Trainer`` does, on those rows of each batch that are left to this replica.

    The outputs of a replica are in ``replicas/ID`` in the dump folder, its checkpoints in the folder of the run.
    """

    takes_lease = False  # until it begins the run, and leads

    def __init__(self, config: JobConfig, *arguments: Any, **options: Any) -> None:
        self.replica_config = section_of(config, ReplicasConfig)
        self.recheck = section_of(config, RecheckConfig)
        check_config(config, self.replica_config)
        if config.training.sums != "exact":
            logger.warning("replicas: with training.sums = 'fast' the bits of the run depend on which replicas live")
        self.folder_of_all = Path(config.job.dump_folder)
        own_folder = self.folder_of_all / "replicas" / self.replica_config.own_id
        self.files = RunFiles(self.folder_of_all, own_folder, self.open_writers, self.restore_run_files)
        checkpoints = config.checkpoint.location(self.folder_of_all.absolute())
        self.options = _hash(config)
        self.stage_has_ended = False
        self.presence: Presence | None = None  # on rank 0
        self._postponed_save = -1  # the step of a save that waits until it is known who leads; -1: none
        super().__init__(
            replace(
                config,
                job=replace(config.job, dump_folder=str(own_folder)),
                checkpoint=replace(config.checkpoint, folder=checkpoints),
            ),
            *arguments,
            **options,
        )
        # So that replicas whose steps take different times act on a result after the same step.
        self.step_check.needs_result = lambda _: True
        if self.replica_config.on_stop == "all":
            self.step_check.stop = self.shared_stop
            if self.validator is not None:
                self.validator.must_stop = lambda: False  # the step after it stops

    def build_replicas(self, config: JobConfig) -> Replicas:  # noqa: ARG002
        self.group = ReplicaGroup(self.replica_config)
        self.group.must_stop = lambda: self.stop.pending
        if self.recheck.interval:
            self.group.hash_of_state = self.hash_of_state
        if self.replica_config.on_stop == "all":
            self.shared_stop = SharedStop(self.stop)
            self.group.is_stopping = lambda: self.stop.pending
            self.group.stop_all = self.shared_stop.request
        return self.group

    def find_run_folder(self) -> Path:
        return self.folder_of_all

    def build_metrics(self) -> MetricsRecorder:
        """Writes metrics.jsonl alone: ``files`` has the other writers."""
        metrics = super().build_metrics()
        metrics.config = replace(metrics.config, enable_tensorboard=False, writers=())
        return metrics

    def open_writers(self, start_step: int) -> Writers:
        """The writers of the run."""
        run, folder, stage = self.group.run, self.folder_of_all, self.config.job.stage
        undone = changes_steps(folder / "metrics.jsonl", start_step, hash_of_changes(self.config_toml), stage)
        return Writers(self.config.metrics, folder, self.config_toml, start_step, run, undone)

    def restore_outputs(self) -> None:
        """Only the replica that leads writes to the folder of the run: see ``restore_run_files``."""

    def restore_run_files(self) -> None:
        """Add the metrics in the newest checkpoint to the folder of the run."""
        newest = self.newest_checkpoint()
        if newest >= 0:
            with BestEffort("restoring metrics"):
                self.output_copies.restore(self.storage.open(newest))

    def newest_checkpoint(self) -> int:
        """The step of the newest checkpoint; -1 if there is none, or that is not known."""
        steps: list[int] = []
        with BestEffort("listing checkpoints"):
            steps = self.storage.steps() if self.config.checkpoint.enable else []
        return max(steps, default=-1)

    def prepare_dump_folder(self) -> None:
        super().prepare_dump_folder()
        self.files.begin_process()

    def config_of_run(self) -> JobConfig:
        return super().config_of_run() if self.group.is_leader else self.config

    def create_dump_folder(self) -> None:
        """Also reads, before the model is built, which other replicas live."""
        super().create_dump_folder()
        if not self.storage.keeps_notes:
            logger.warning(
                "replicas: %s keeps no notes (CheckpointStorage.write_note), by which a replica that starts knows that "
                "others train: if the lighthouse is restarted meanwhile, it may train alone beside them",
                self.storage,
            )

        def build_presence() -> int:
            self.presence = Presence(self.storage, self.replica_config.own_id, self.plan.number)
            return self.presence.process

        self.group.process = broadcast_from_rank0(build_presence, self.gloo_group)

    def states(self) -> dict[str, Stateful]:
        self.place = PlaceState(self.dataloader, self.mesh)
        return super().states() | {"loader": self.place}

    def load_checkpoint(self) -> int:
        """Take the state of a replica that runs, or begin the run or resume it if none does."""
        if rank() == 0:
            self.files.begin_process()
        self.group.connect(
            self.live_state,
            self.load_live_state,
            run=self.checkpointer.lease.run,
            stage=self.plan.number,
            end_of_stage=lambda number: self.plan.first_step(number + 1) - 1,
            options=self.options,
            group=self.gloo_group,
        )
        try:
            begins = not self.joins()
            if begins:
                self.begin_run()
            else:
                self.announce()
        except BaseException as error:
            if isinstance(error, OtherStageError):
                self.group.close()
            self.close_presence()
            raise
        self.checkpointer.lease = replace(self.checkpointer.lease, run=self.group.run)
        if begins and self.group.is_leader and rank() == 0:
            self.files.begin_run(self.group.run, resumed=self.group.step > 0)
        self._has_begun, self._beginning = True, self.group.progress[1]
        how = f"takes the state of step {self.group.step}" if self.group.has_joined else "begins"
        logger.info("replicas: %s %s; %s", self.name, how, self.describe())
        return self.group.step

    @property
    def resumes_from(self) -> str:
        return "the state of another replica" if self.group.has_joined else super().resumes_from

    def joins(self) -> bool:
        """Agree on the members, and take their state if one has it. Wait for replicas that live, by their notes.

        Returns False if nobody has the state of the run: then all members begin it.
        """
        waits_since = math.inf

        def others_and_beginning() -> tuple[list[str], int]:
            assert self.presence is not None
            return self.presence.others(), self.presence.beginning

        while True:
            others, self.group.beginning = broadcast_from_rank0(others_and_beginning, self.gloo_group)
            self.group.is_alone = not others
            self.group.begin()
            if self.group.has_joined:
                return True
            if any(member.is_alone for member in self.group.members):
                return False
            names, now = ", ".join(others), time.monotonic()
            if waits_since == math.inf:
                waits_since = now
                logger.info(
                    "replicas: the lighthouse does not know %s, which train or have trained until a moment ago, by "
                    "their notes in %s: waits for them, or until they are dead for %d s",
                    *(names, self.storage, DEAD_SECONDS),
                )
            if self.stop.agree(self.gloo_group):
                raise StoppedError(f"asked to stop while waiting for the replicas {names}")
            if now - waits_since > self.replica_config.quorum_timeout_seconds:
                raise StorageError(
                    f"the replicas {names} train, by their notes in {self.storage}, but the lighthouse "
                    f"{self.replica_config.lighthouse} has not known them for "
                    f"{self.replica_config.quorum_timeout_seconds} s (replicas.quorum_timeout_seconds): give all "
                    "replicas of a run the same replicas.lighthouse, or end those"
                )
            time.sleep(WAIT_SECONDS)

    def begin_run(self) -> None:
        """Begin the run, or resume it from its newest checkpoint, together with the other members.

        The checkpoint that was selected at the start may be an old one by now, or deleted.
        """
        early = self.checkpointer.start
        self.group.beginning += 1
        self.announce()
        # The lease supersedes the save of a replica that only seems dead.
        self.takes_lease = self.group.is_leader
        try:
            start = self.find_resume_point(None, early.group)
        except SupersededError as error:
            raise StorageError(f"another replica saves while this one begins: {error}") from error
        if start.step is None and early.step is not None:
            raise CheckpointError(f"{self.storage} had step-{early.step} a moment ago, and is empty now")
        self.checkpointer.begin_from(start)
        self.group.run = start.lease.run
        self.group.since = self.checkpointer.resume() or 0
        self.group.progress = self.plan.number, self.group.beginning, 0, self.group.since
        self.group.begin()  # others may have loaded another checkpoint

    def announce(self) -> None:
        """Tell those that start, by a note, that this replica has the state of the run."""

        def begin() -> None:
            assert self.presence is not None
            self.presence.begin(self.group.beginning)

        on_rank0(begin, self.gloo_group)

    def close_presence(self) -> None:
        """Tell that this replica has ended."""
        if self.presence is not None:
            self.presence.close()

    @property
    def name(self) -> str:
        """This replica, for messages."""
        return f"replica {self.replica_config.own_id!r}"

    def describe(self) -> str:
        """The members, for messages."""
        names = ", ".join(member.name for member in self.group.members)
        return f"members: {names}; {self.group.members[self.group.leader].name} writes the run's files"

    def live_state(self) -> dict[str, Tensor]:
        """What a replica that joins takes: this rank's part of all states, the hash of the options, and on rank 0 the
        lines of metrics since the last save."""
        sizes = torch.tensor(self.place.layout.state_sizes)
        lines = b""
        if rank() == 0:
            lines = self.files.lines_after(self.newest_checkpoint())
        as_tensor = torch.frombuffer(bytearray(lines or b"\n"), dtype=torch.uint8)
        return {OPTIONS: torch.tensor(self.options), PLACE_SIZES: sizes, LINES: as_tensor, **self.own_state()}

    def own_state(self) -> dict[str, Tensor]:
        """This rank's part of all states."""
        return {name: local(tensor) for name, tensor in flatten(self.checkpointer.states).items()}

    @torch.no_grad()
    def load_live_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the ``live_state`` of the rank of this number in another replica."""
        self.group.require_options(int(state[OPTIONS]))
        self.place.set_sizes(state[PLACE_SIZES].tolist())
        if rank() == 0:
            self.files.receive(state[LINES].numpy().tobytes())
        states = self.checkpointer.states
        tensors = flatten(states)
        for name, tensor in tensors.items():
            local(tensor).copy_(state[name])
        for name, of in states.items():
            of.load_state_dict(
                {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
            )

    def train(self) -> int:
        try:
            return super().train()
        except SupersededError:
            self.files.update(False)  # what is left in the folder of this replica is that of the newer process
            raise
        finally:
            self.group.close()
            self.files.end()
            self.close_presence()

    def run_steps(self) -> None:
        try:
            super().run_steps()
            while self.step >= self.config.training.steps and not self.stage_has_ended:
                self.wait_for_last_save()
                if self.step >= self.config.training.steps:
                    break
                super().run_steps()
        except BaseException:
            self.group.close()  # the others do not wait until a save in progress has ended
            raise
        self.group.close()
        self.files.end()  # what the summary at the end of the log is made from

    def take_step(self, batches: Iterator[Batch]) -> tuple[TokenLoss, Tensor] | None:
        while True:
            self.begin_step()
            if self.step >= self.config.training.steps:  # taken from a replica that has completed the run
                return None
            if self.stop.agreed:  # while it waited for others
                return None
            with self.watchdog.watch(f"step {self.step + 1}"):
                batch = next(batches, None)
                if batch is None:  # asked to stop while it waited for data
                    return None
                place = self.place.next(self.group, self.gloo_group)
                before = {name: tensor.clone() for name, tensor in self.changing_state().items()}
                try:
                    result = self.train_step(self.step + 1, batch)
                except StepDiscarded:
                    self.discard_step(before)
                    continue
                self.step += 1
                self.place.place.copy_(place)
                self.step_check.wait_if_needed(self.step)
            return result

    def begin_step(self) -> None:
        """Agree on the members, follow a replica that is ahead, and assign rows to this rank."""
        if self._has_begun:
            self.follow_leadership()
        else:
            self.agree_on_members(self.replica_config.min)
        self._has_begun = False
        if self.stage_has_ended or self.stop.agreed:
            return
        self.follow_progress()
        if self._postponed_save == self.step:
            self.save(last=False)
        self._postponed_save = -1
        training, dims = self.config.training, self.parallel_dims
        rows = rows_of(
            self.group.by_age.index(self.group.number),
            self.group.size,
            dims.batch_rank(rank()),
            dims.batch,
            global_batch_size=training.global_batch_size,
            local_batch_size=training.local_batch_size,
        )
        self.place.read(rows)
        self.metrics.tokens_per_step = len(rows) * dims.batch * training.seq_len  # of this replica

    def follow_progress(self) -> None:
        """Continue from the step of the group, which may be another one than that of this replica."""
        beginning = self.group.progress[1]
        if self.group.step == self.step and beginning == self._beginning:
            return
        is_undone, is_new = self.group.step < self.step, beginning != self._beginning
        self.step, self._beginning = self.group.step, beginning
        self.step_check.reset()
        if not is_undone:
            self.metrics.restart(self.step)
        elif is_new:  # others have resumed from a checkpoint: no rollback of the run
            started = {"run": self.group.run, "options": self.metrics.options, "same_process": True}
            self.metrics.record_event(self.step, "start", started)
            self.hooks.undo(self.step)
            self.metrics.restart(self.step)
        else:
            self.metrics.undo(self.step)

    def agree_on_members(self, at_least: int = 1) -> None:
        """Ask for the members until there are so many or this replica is to stop, and log who has come and gone.

        This replica may have missed the end of its stage of the run, after which the others continue with the next one.
        """
        # Validation leaves some parameters gathered. Sending the state shards them again on the ranks that send it, and
        # only these would gather them in the next forward. A rank that takes a state would use those before it.
        for part in self.model.model_parts:
            for module in fsdp_modules(part):
                module.reshard()
        before = self.group.members
        try:
            is_complete = self.group.begin(at_least)
        except OtherStageError:
            self.group.close()  # the others do not wait for it
            logger.info("replicas: the others are in a later stage")
            self.stage_has_ended, self.step = True, self.config.training.steps
            self.follow_leadership()
            return
        self.record_members(before)
        self.follow_leadership()
        self.stop.agreed = self.stop.agreed or not is_complete
        if self.is_checked(self.group.step):
            self.compare_states()

    def follow_leadership(self) -> None:
        """Write the run's files if this replica leads; one that led and hung leads no longer."""
        leads = self.group.is_leader and not self.stage_has_ended
        if rank() == 0:
            if self.group.has_joined:
                self.files.update(False)
            self.files.update(leads)
        if not leads:
            self.forget_superseded_save()

    def is_checked(self, step: int) -> bool:
        """Whether the states of the replicas after ``step`` are compared."""
        return self.recheck.interval > 0 and step % self.recheck.interval == 0

    def hash_of_state(self, step: int) -> int:
        """Hash of this rank's part of all states, if they are compared after ``step``; else 0."""
        if not self.is_checked(step):
            return 0
        hash_of = TensorHash(self.device)
        return combine(read({name: [hash_of(tensor)] for name, tensor in self.own_state().items()}).values())

    def compare_states(self) -> None:
        """Log which replicas have another state than most.

        Raises:
            HardwareError: this is one of them, or may be, and ``recheck.on_wrong_rank`` is "stop".
        """
        numbers, is_known = self.group.other_states()
        if not numbers:
            return
        names = [self.group.members[number].name for number in numbers]
        self.metrics.record_event(self.group.step, "wrong_replica", {"named": is_known, "replicas": names})
        who = f"the states of the replicas {', '.join(names)} differ, and none is that of most"
        if is_known:
            who = f"{', '.join(names)} has another state than most replicas"
        message = f"replicas: after step {self.group.step}, {who}"
        if self.recheck.on_wrong_rank == "stop" and self.group.number in numbers:
            raise HardwareError(f"{message}. Exclude that machine, and start the replica again")
        logger.warning("%s", message)

    def changing_state(self) -> dict[str, Tensor]:
        """The state that changes before the vote."""
        sums = self.model.reducer.state
        return {} if sums is None else sums.state_dict()

    def discard_step(self, before: dict[str, Tensor]) -> None:
        """Undo what the discarded step has changed."""
        self.optimizer.zero_grad()
        if self.model.reducer.state is not None:
            self.model.reducer.state.load_state_dict(before)
        self.place.discard()
        logger.warning("replicas: step %d is discarded, and computed again", self.step + 1)
        self.metrics.record_event(self.step + 1, "step_discarded", {})

    def record_members(self, before: list[Any]) -> None:
        """Log which replicas have left and joined since the members were ``before``."""
        old, new = ({(member.name, member.since) for member in of} for of in (before, self.group.members))
        for name, _ in sorted(old - new):
            self.metrics.record_event(self.step, "replica_left", {"replica": name})
            logger.warning("replicas: %s has left after step %d; %s", name, self.step, self.describe())
        for name, _ in sorted(new - old):
            self.metrics.record_event(self.step, "replica_joined", {"replica": name})
            logger.info("replicas: %s has joined after step %d; %s", name, self.step, self.describe())

    def save(self, last: bool, *, required: bool = True) -> None:
        """As ``Trainer.save``, on the replica that leads; it acquires the writer lease first."""
        if not self.checkpointer.is_due(self.step, last):
            return
        if not self.group.is_leader:
            self.checkpointer.clock.agreed = False
            self.checkpointer.clock.start()
            return
        if not last and self._postponed_save != self.step and self.has_hung():
            self._postponed_save = self.step
            return
        try:
            if self.acquire_lease(last):
                super().save(last, required=required)
                self.group.last_saved = self.step
        except SupersededError as error:
            logger.warning("replicas: another replica saves meanwhile: %s", error)
        except StorageError as error:
            if last:
                raise
            logger.error("%s; the last valid checkpoint is kept", error)

    def acquire_lease(self, last: bool) -> bool:
        """Acquire the writer lease for a save; returns whether this replica still leads, and has it."""
        self.forget_superseded_save()
        # One that was asked to stop may have left for a regular save of the same step.
        if last and not self.group.has_left and self.has_hung():
            self.agree_on_members()
            if self.stage_has_ended or not self.group.is_leader or self.group.step != self.step:
                return False
        if rank() == 0:  # others leave after the last save, and do not add what this one may not write any more
            self.files.update(True)
        if self.stop.agreed and self.step < self.config.training.steps:  # the others do not wait for its save
            self.group.close()
        with self.watchdog.watch(f"lease for step {self.step}"):
            if not last:
                return self.checkpointer.try_to_take_lease(self.step)
            self.checkpointer.take_lease(self.step)
        return True

    def has_hung(self) -> bool:
        """Whether this replica has not heard of the others for a while, so that another one may lead. Collective.

        Then it writes to the folder of the run only after it has heard of them again.
        """
        has_hung = torch.tensor(time.monotonic() - self.group.heard_at > HANG_SECONDS, dtype=torch.int64)
        all_reduce(has_hung, self.gloo_group, torch.distributed.ReduceOp.MAX)
        return bool(has_hung)

    def forget_superseded_save(self) -> None:
        """A replica that led, hung and came back may have a save in progress that another one has superseded."""
        try:
            self.checkpointer.wait()
        except SupersededError as error:
            logger.warning("replicas: %s", error)

    def wait_for_last_save(self) -> None:
        """Leave only when a replica has saved the last step: if the one that does it dies, another one does.

        If others have resumed from a checkpoint meanwhile, this replica is at their step then.
        """
        if not self.config.checkpoint.enable:
            return
        while all(member.saved != self.step for member in self.group.members):
            self.agree_on_members()
            if self.stage_has_ended:
                return
            if self.group.step < self.step:
                self.follow_progress()
                self._has_begun = True
                return
            if self.group.is_leader and self.group.last_saved != self.step:
                self.save(last=True)

    def roll_back(self) -> None:
        """The replica that leads loads the checkpoint. It is ahead then, and the others take its state."""
        stage, beginning, rollbacks, _ = self.group.progress
        while self.group.progress[1:3] == (beginning, rollbacks):
            self.forget_superseded_save()
            may_be_late = self.group.is_leader and self.has_hung()
            self.group.is_rolling_back = not may_be_late
            if self.group.is_leader and not may_be_late:
                self.checkpointer.take_lease(self.step)
                super().roll_back()
                self.group.progress = stage, beginning, rollbacks + 1, self.step
                self._has_begun = self.group.is_rolling_back = False
                return
            self.agree_on_members()
            if self.stage_has_ended:
                return
            self._has_begun = True
        self.group.is_rolling_back = False
        if self.group.progress[1] != beginning:
            self.follow_progress()
            return
        self.step = self.group.step
        self.step_check.reset()
        self.metrics.undo(self.step)

    def missing_exports(self) -> list[Hook]:
        return super().missing_exports() if self.group.is_leader else []


@dataclass
class SharedStop(Request):
    """A request to stop that all replicas have learned of, for ``StepCheck``: they stop after the same step."""

    stop: StopRequest
    pending: bool = False

    @property
    def agreed(self) -> bool:
        return self.stop.agreed

    @agreed.setter
    def agreed(self, agreed: bool) -> None:
        self.stop.agreed = agreed

    def request(self) -> None:
        """Stop after this step."""
        self.pending = True


def _hash(config: JobConfig) -> int:
    """Hash of what must be equal in all replicas: the options and the number of ranks."""
    same = replace(
        config,
        job=replace(config.job, dump_folder="", config_file=""),
        plugins={name: section for name, section in config.plugins.items() if name != ReplicasConfig.section_name},
    )
    return xxhash.xxh3_64_intdigest(f"{world_size()} {to_toml(same)}".encode()) >> 1
