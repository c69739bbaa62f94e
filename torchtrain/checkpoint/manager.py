"""Save, load and roll back to the checkpoints of a run, which a ``CheckpointStorage`` stores."""

import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from torchtrain.checkpoint.format import DATA_FILES, Manifest, VerifiedReader, VerifiedWriter
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.resume import History, ResumePoint, check_resume
from torchtrain.checkpoint.retention import LOSSES, Losses, losses_to_bytes, not_kept, read_losses
from torchtrain.checkpoint.states import LoaderState, Stager, flatten, load_tensors, save_tensors
from torchtrain.checkpoint.storage import CheckpointStorage, OutputCopies, WriterLease
from torchtrain.config.run_plan import OtherStageError
from torchtrain.distributed.agreement import broadcast_from_rank0, gather_from_all_ranks
from torchtrain.distributed.mesh import local
from torchtrain.errors import CheckpointError, StoppedError, SupersededError, TorchtrainError
from torchtrain.logging import BestEffort, logger

SECONDS_AFTER_ERROR = 30.0
POLL_SECONDS = 1.0


class Stop(Protocol):
    """A request to stop the run (implemented in ``fault_tolerance/stop_request.py``)."""

    @property
    def pending(self) -> bool:
        """Whether this rank was asked to stop."""

    @property
    def agreed(self) -> bool:
        """Whether any rank was asked to stop."""

    def may_wait(self, began: float) -> bool:
        """Whether to keep waiting for an operation that started at ``began``, in ``time.monotonic()`` seconds."""


class SaveClock:
    """Timer for time-based saves: checks whether ``minutes`` have passed since the last save; 0 disables it.

    Clocks differ between ranks, so the ranks agree on the result once per step (``StepCheck``).
    """

    def __init__(self, minutes: float) -> None:
        self.seconds = 60 * minutes if minutes else math.inf
        self.agreed = False
        """Whether a save is due by the clock of any rank; all ranks learn of it at the same step."""
        self.start()

    def start(self) -> None:
        """Start the timer: at the start of the run, and after each save, whether it succeeded or failed."""
        self._since = time.monotonic()

    def save_begins(self) -> None:
        """Stop the timer during a save: the next save would have to wait for this one."""
        self.agreed, self._since = False, math.inf

    @property
    def pending(self) -> bool:
        """Whether a save is due by this rank's clock."""
        return time.monotonic() - self._since >= self.seconds


@dataclass(eq=False)
class CheckpointManager(AbstractContextManager["CheckpointManager"]):
    """Saves and loads ``states`` in ``storage``, which all ranks share. All methods are collective.

    If ``config.enable`` is false, nothing is saved. An asynchronous save proceeds as follows on each rank:

        main thread                         thread "save"                          in a local folder
        maybe_save(100): wait for the
          previous save, copy the state,
          start the thread                  write this rank's tensors              step-100.ID.partial
        steps 101, 102, ...                 wait for all ranks' tensors
                                            rank 0: write the manifest, check
                                            the writer lease and all files         step-100 (renamed)
                                            the future ``_pending`` completes
        maybe_save(200): the future's       rank 0: delete old checkpoints
          error is raised here

    ID is the id of the writer lease. Each start of the run acquires its own lease (``resume.py``), after which
    earlier starts can no longer commit a checkpoint. A start renames and deletes only checkpoints that existed when it
    acquired the lease, or that it has saved itself: not others that a user has put under their names since.
    """

    config: CheckpointConfig
    storage: CheckpointStorage
    states: Mapping[str, Stateful]
    config_toml: str  # the resolved config, stored in every checkpoint
    start: ResumePoint
    stop: Stop | None = None  # None: the run is never asked to stop
    outputs: OutputCopies = field(default_factory=OutputCopies)  # those of the run, such as metrics
    step_group: dist.ProcessGroup | None = None  # gloo group of the training thread; saves use another one
    validation_losses: Callable[[], Losses] = dict  # those in the dump folder, for ``keep_best_k``

    def __post_init__(self) -> None:
        self.group = self.start.group
        self.rank = dist.get_rank()
        self.clock = SaveClock(self.config.interval_minutes if self.config.enable else 0)
        self.stager = Stager(overlap=self.config.async_mode == "async_with_pinned_mem")
        self._pending: Future[None] | None = None
        self._writer: VerifiedWriter | None = None  # of the save in progress, or of the last one
        self._thread: threading.Thread | None = None  # writes the checkpoint, then deletes old ones
        self.loaded = ""
        """Path or URL of the checkpoint that was loaded last; empty if there is none."""
        self._newest = -1  # step that was last saved, is being saved, or was last loaded in full; -1: none
        self._attempted: set[int] = set()
        self.begin_from(self.start)
        self._failed_in_a_row = 0
        # Of checkpoints before the one that was loaded: the dump folder may be new, or local to another node.
        self._earlier_losses: Losses = {}

    # Loading

    def begin_from(self, start: ResumePoint) -> None:
        """Resume from ``start``. Called again before anything is loaded or saved, if it has been selected again."""
        self.start, self.lease = start, start.lease
        # The steps of this run, which no rollback or earlier resume has superseded, are those up to the checkpoint that
        # was last loaded, and those that this start has saved, or tried to, since (``_attempted``).
        self._last_loaded = -1 if start.step is None else start.step
        # The checkpoints that this start may rename and delete, as ``CheckpointStorage.versions``; None for one whose
        # save has failed, perhaps after the commit, so that any of this step may be it.
        self._own: dict[int, Hashable] = dict(start.found)

    def resume(self) -> int | None:
        """Load the newest valid checkpoint among ``start.candidates`` and return its step; None for a new run.

        Damage is often detected only in the middle of a load. Then the next older checkpoint is loaded, and overwrites
        all tensors. Damaged checkpoints that this start owns are renamed.

        Raises:
            CheckpointError: no checkpoint is valid, or the config is incompatible with a valid one.
        """
        if self.start.step is None:
            return None
        history, config = self._history(), self.config

        def use(step: int) -> None:
            if step != self.start.step:  # find_resume_point has checked that one
                check_resume(history, step, config, self.config_toml, self.start.data, self.start.data_files)
            self.load(step)

        try:
            step, damaged = history.latest_valid(self.start.candidates, use)
        except OtherStageError as error:
            self._quarantine(history, error.damaged)  # the trainer of that stage must not try them again
            raise
        if step is None:
            history.require_none(config.load_step, damaged)
            raise CheckpointError(f"{self.storage} had step-{self.start.step} a moment ago, and is empty now")
        self._quarantine(history, damaged)
        return step

    def restore_outputs(self) -> None:
        """Add the metrics in the checkpoint that the run has resumed from to those in the dump folder; on rank 0."""
        if self._last_loaded >= 0:
            with BestEffort("restoring metrics"):
                self.outputs.restore(self.storage.open(self._last_loaded))

    def roll_back(self, bad_step: int, only: Collection[str]) -> int | None:
        """Load the newest valid checkpoint of this run before ``bad_step`` into the states named in ``only``.

        Checkpoints that a rollback or an earlier resume has superseded are not considered.

        Returns:
            The step of the checkpoint; None if there is no valid one, and then the states may be partly overwritten.
        """
        self.wait()
        self._wait_for_deletion()  # it could delete the checkpoint that is loaded here
        history = self._history()
        steps = [step for step in history.candidates() if step < bad_step and self._is_of_this_path(step)]
        step, damaged = history.latest_valid(steps, lambda step: self.load(step, only))
        if step is not None:
            self._quarantine(history, damaged)
        return step

    def _history(self) -> History:
        return History(self.storage, self.group, self.lease.run)

    def _quarantine(self, history: History, damaged: Mapping[int, str]) -> None:
        history.quarantine(damaged, self._check_lease, self._is_own)

    def _is_of_this_path(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is on the path of this run, not superseded by a rollback or resume."""
        return step <= self._last_loaded or step in self._attempted

    def _is_own(self, step: int, versions: Mapping[int, Hashable]) -> bool:
        """Whether this start may change the checkpoint of ``step``; ``versions``: those of the storage now."""
        return step in self._own and self._own[step] in (None, versions.get(step))

    def load(self, step: int, only: Collection[str] = ()) -> None:
        """Load the checkpoint of ``step`` into the states: those named in ``only``, or all if ``only`` is empty.

        Raises:
            DamagedError: a file is damaged. Some tensors may already be overwritten: load another checkpoint in full.
        """
        states = {name: state for name, state in self.states.items() if not only or name in only}
        checkpoint = broadcast_from_rank0(lambda: self.storage.open(step), self.group)
        loader = states.get("loader")
        reader = VerifiedReader(checkpoint)
        if isinstance(loader, LoaderState):
            gather_from_all_ranks(lambda: loader.expect(reader), self.group)
        if self.config.keep_best_k:
            self._earlier_losses = broadcast_from_rank0(lambda: read_losses(checkpoint), self.group)
        tensors = load_tensors(flatten(states), reader, self.group)
        for name, state in states.items():
            own = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
            state.load_state_dict(own)
        # After a partial load, the state at this step differs from its checkpoint, so that it must be saved again.
        self._newest = -1 if only else step
        self._last_loaded = step
        self.loaded = str(checkpoint)
        logger.info(f"{'rolled back to' if only else 'resumed from'} {checkpoint}")

    # Saving

    def is_due(self, step: int, last: bool = False) -> bool:
        """Whether ``maybe_save`` will save ``step``; identical on all ranks."""
        return self.config.enable and (last or step % self.config.interval == 0 or self.clock.agreed)

    def maybe_save(self, step: int, last: bool = False, required: bool = True) -> None:
        """Save a checkpoint of ``step`` if one is due and ``step`` is not saved yet.

        A save is due if ``step`` is a multiple of ``config.interval``, if it is the ``last`` step of the run, or if the
        ranks have agreed that ``config.interval_minutes`` have passed.

        Depending on ``config.async_mode``, this returns once the state is copied or once the checkpoint is on disk;
        for the last step, always once it is on disk. A failed save is logged and training continues.

        Raises:
            CheckpointError: ``config.max_failed_saves`` saves in a row have failed, or a last one that is ``required``.
            SupersededError: a newer start of the run has acquired the writer lease.
            StoppedError: the run was asked to stop, and a save does not complete in time.
        """
        if not self.is_due(step, last):
            return
        required = required and last
        if step == self._newest:
            self.wait(required)  # the run was asked to stop right after a save
            return
        started = time.perf_counter()
        self.wait()
        self._newest = step
        self.clock.save_begins()
        tensors = flatten(self.states)
        if self.config.async_mode == "disabled" or last:
            values = {name: local(tensor) for name, tensor in tensors.items()}
        else:
            values = self.stager.copy_to_host(tensors)
        self._pending = Future()
        new_checkpoint = self.storage.new_checkpoint(step, self.lease)
        small_files: dict[str, bytes | Callable[[], bytes]] = {DATA_FILES: self.start.data_files}
        if self.config.keep_best_k:
            small_files[LOSSES] = lambda: losses_to_bytes(self._known_losses(), list(self._own))
        self._writer = VerifiedWriter(
            new_checkpoint,
            self.config_toml,
            small_files=small_files,
            add_files=self.outputs.add_to_checkpoint,
            manifest=Manifest(step, self.lease.run, self.start.data, self._loader_layout()),
            before_commit=partial(self._before_commit, step),
            require_lease=self._check_lease,
        )
        location = self._writer.new.location
        save = partial(save_tensors, tensors, values.__getitem__, self._writer, location, self.group)
        # A daemon thread, so that a save that waits for a failed rank does not keep the other processes from exiting.
        # The thread's collectives stay in order because all ranks save at the same steps, and one save at a time.
        arguments = (save, self._pending, self._writer, step, started)
        self._thread = threading.Thread(target=self._save_in_background, args=arguments, name="save", daemon=True)
        self._thread.start()
        if self.config.async_mode == "disabled" or last:
            self.wait(required)

    def take_lease(self, step: int) -> None:
        """Acquire the writer lease for a save of ``step``, unless this start holds it; see ``find_resume_point``.

        Checkpoints before ``step`` are of this run, whichever replica has saved them: they are not superseded.
        """
        self.wait()

        def acquire() -> tuple[WriterLease, dict[int, Hashable], set[int]]:
            if self.lease.id and self.storage.read_lease().id == self.lease.id:
                return self.lease, self._own, self._attempted
            lease = self.storage.acquire_lease(self.lease.run)
            versions = self.storage.versions()
            return lease, dict(versions), {earlier for earlier in versions if earlier < step}

        self.lease, self._own, self._attempted = broadcast_from_rank0(acquire, self.group)

    def try_to_take_lease(self, step: int) -> bool:
        """As ``take_lease``; one that fails, as on a full disk, is logged, and counts as a failed save.

        Raises:
            CheckpointError: ``config.max_failed_saves`` saves in a row have failed.
            SupersededError: as for a save.
        """
        self.wait()  # its errors are counted there
        try:
            self.take_lease(step)
        except SupersededError:
            raise
        except CheckpointError as error:
            if self.rank == 0:
                logger.error(f"{error}; the last valid checkpoint is kept")
            self.clock.save_begins()  # the next one is due as after any failed save
            self.clock.start()
            self._count_failed_save(error)
            return False
        return True

    def _loader_layout(self) -> dict[str, Any] | None:
        loader = self.states.get("loader")
        return asdict(loader.layout) if isinstance(loader, LoaderState) else None

    def wait_for_copies(self) -> None:
        """Wait for pending copies of the state (``async_with_pinned_mem``). Call it just before the optimizer step."""
        self.stager.wait_for_copies()

    def wait(self, required: bool = False) -> None:
        """Block until the save in progress is on disk. Raises as ``maybe_save`` does, identically on all ranks."""
        if self._pending is None:
            return
        began = time.monotonic()
        try:
            while not self._has_ended_on_all_ranks(self._pending, began):
                pass
            pending, self._pending = self._pending, None
            self._attempted.add(self._newest)  # even if it fails: what failed may have come after the commit
            pending.result()
            self._failed_in_a_row = 0
        except RuntimeError as error:
            if self.stop is not None and (self.stop.pending or self.stop.agreed):
                raise self._aborted("failed, since another rank has left") from error
            raise
        except CheckpointError as error:
            self._newest = -1
            if required or isinstance(error, SupersededError):
                raise
            self._count_failed_save(error)

    def _count_failed_save(self, error: CheckpointError) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self.config.max_failed_saves:
            too_many = CheckpointError(
                f"{error}; that is {self._failed_in_a_row} failed saves in a row, and checkpoint.max_failed_saves "
                f"= {self.config.max_failed_saves}"
            )
            too_many.exit_code = error.exit_code
            raise too_many from error

    def _has_ended_on_all_ranks(self, pending: Future[None], began: float) -> bool:
        """Wait for the save for ``POLL_SECONDS``; returns whether it has ended on all ranks. Collective.

        Raises:
            StoppedError: on all ranks, if one of them was asked to stop, and may not wait any longer.
        """
        is_running = not futures.wait([pending], timeout=POLL_SECONDS).done
        states = torch.tensor([is_running, is_running and not self._may_wait(began)], dtype=torch.int32)
        dist.all_reduce(states, op=dist.ReduceOp.MAX, group=self.step_group)
        if states[1]:
            raise self._aborted(f"does not end ({self.status() or 'another rank is writing'})")
        return not states[0]

    def _may_wait(self, began: float) -> bool:
        return self.stop is None or self.stop.may_wait(began)

    def _aborted(self, why: str) -> StoppedError:
        return StoppedError(
            f"asked to stop, and the save of step {self._newest} {why}: it is aborted; the last valid checkpoint is "
            "kept"
        )

    def status(self) -> str:
        """Description of what this rank's save is doing, and since when; empty if no save is in progress."""
        if self._pending is None or self._writer is None or self._pending.done():
            return ""
        since = time.strftime("%H:%M:%S", time.localtime(self._writer.since))
        problem = self._writer.new.problem
        return f"step-{self._newest}: {self._writer.doing} since {since}{f' ({problem})' if problem else ''}"

    def _save_in_background(
        self, save: Callable[[], None], done: Future[None], writer: VerifiedWriter, step: int, started: float
    ) -> None:
        """Call ``save``, which writes and commits by ``writer``, and set the result or the error of ``done``.

        ``started``: when the save began, in ``time.perf_counter()`` seconds.
        """
        try:
            try:
                self.stager.wait()
                save()
            finally:
                self.clock.start()
        except Exception as error:
            if isinstance(error, CheckpointError) and not isinstance(error, SupersededError) and self.rank == 0:
                logger.error(f"{error}; the last valid checkpoint is kept")
            done.set_exception(error)
            return
        if self.rank == 0:
            if writer.superseded_name:
                self._log_superseded(step, writer.superseded_name)
            logger.info(f"saved {writer.new.location} in {time.perf_counter() - started:.1f} s")
        done.set_result(None)
        if self.rank == 0:
            # Only once the save counts as done: deleting can take longer than writing, and nothing has to wait for it.
            self._delete_old(step)
            self.outputs.update(step)

    def _check_lease(self) -> None:
        self.storage.check_lease(self.lease)

    def _before_commit(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` supersedes an existing one; see ``NewCheckpoint.commit``.

        Raises:
            SupersededError: a newer start of the run has acquired the writer lease.
            CheckpointError: another process has put a checkpoint there.
        """
        supersedes = self._retire_newer_checkpoints(step)
        self._check_lease()
        self._own[step] = None
        return supersedes

    def _retire_newer_checkpoints(self, step: int) -> bool:
        """Rename the checkpoints that the one of ``step`` supersedes: later steps from before a rollback or resume.

        Checkpoints that this process has saved before ``step`` stay. An existing checkpoint of ``step`` itself is left
        to the commit, because it may be the only one: then this returns True.
        """
        self._check_lease()
        supersedes = False
        versions = self.storage.versions()
        for later in sorted(versions):
            if later < step and self._is_of_this_path(later):
                continue
            if self._is_own(later, versions):
                if later == step:
                    supersedes = True
                else:
                    name = self.storage.set_aside(later, "superseded", self._check_lease)
                    self._log_superseded(later, name)
            elif later == step:
                self._check_lease()  # a newer start may have saved it
                raise CheckpointError(
                    f"{self.storage.open(step)} has appeared since this run was started, which has not saved it: move "
                    "it away"
                )
        return supersedes

    def _log_superseded(self, step: int, name: str) -> None:
        logger.info(
            f"the checkpoint of step {step} was superseded by a rollback or an earlier resume: it is renamed to {name}"
        )

    def _delete_old(self, saved: int) -> None:
        """Delete old checkpoints of this run, after the save of the step ``saved``."""
        try:
            versions = self.storage.versions()
            self._own[saved] = versions.get(saved)
            steps = [step for step in sorted(versions) if self._is_own(step, versions)]
            complete = [step for step in steps if self.storage.has_manifest(step)]
            losses = self._known_losses() if self.config.keep_best_k else {}
            for step in not_kept(self.config, complete, losses):
                self.storage.delete(step, self._check_lease)
                # The deletion after the save before, which may still be at work, may have removed it.
                self._own.pop(step, None)
        except (OSError, TorchtrainError) as error:
            logger.warning(f"a checkpoint that is too old to keep cannot be deleted: {error}")

    def _known_losses(self) -> Losses:
        return {**self.validation_losses(), **self._earlier_losses}

    def _wait_for_deletion(self) -> None:
        began = time.monotonic()
        while self._thread is not None and self._thread.is_alive() and self._may_wait(began):
            self._thread.join(timeout=POLL_SECONDS)

    def close(self) -> None:
        """Wait for the save and the deletion in progress, then destroy the process group."""
        self.wait()
        self._wait_for_deletion()
        dist.destroy_process_group(self.group)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif self._pending is not None and not isinstance(error, StoppedError):
            # A save that started before the error can still complete if the other ranks stay alive long enough.
            with suppress(Exception):
                self._pending.result(timeout=SECONDS_AFTER_ERROR)
