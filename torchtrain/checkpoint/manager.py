"""Saving, finding and loading the checkpoints of a run: ``<dump folder>/checkpoint/step-N``."""

import shutil
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from torchtrain.checkpoint.claim import Claim
from torchtrain.checkpoint.contract import check_contract
from torchtrain.checkpoint.staging import Stager
from torchtrain.checkpoint.states import flatten, load_tensors, local_part, save_tensors, unflatten
from torchtrain.checkpoint.storage import (
    CONFIG,
    MANIFEST,
    PARTIAL_SUFFIX,
    VerifiedReader,
    VerifiedWriter,
    read_manifest,
    verify_file,
)
from torchtrain.config.schema import Checkpoint
from torchtrain.errors import CheckpointError, SupersededError
from torchtrain.log import logger

T = TypeVar("T")

# A rank that dies closes its connections, which the others see at once; a slow disk must not look like that.
GROUP_TIMEOUT = timedelta(hours=1)
SECONDS_AFTER_ERROR = 30.0


class CheckpointManager:
    """Saves and loads ``states`` in ``folder``, which all ranks share. All methods are collective.

    The process group must be initialized; the manager talks over a gloo group of its own. ``config_toml`` is the
    resolved config, kept in every checkpoint. With ``config.enable`` off, nothing is found and nothing is saved.
    """

    def __init__(self, config: Checkpoint, folder: Path, states: Mapping[str, Stateful], config_toml: str) -> None:
        assert dist.is_initialized()
        self.config = config
        self.folder = folder
        self.states = states
        self.config_toml = config_toml
        self.group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.stager = Stager(overlap=config.async_mode == "async_with_pinned_mem")
        self._pending: Future[float] | None = None
        self._writer: threading.Thread | None = None
        self._newest = -1  # step of the last save that was begun
        self._claim: Claim | None = None  # of rank 0
        self._generation = 0
        self._failed_in_a_row = 0
        self.seconds_of_last_save: float | None = None

    # Finding

    def step_to_load(self) -> int | None:
        """The step to resume from, or None to start from the beginning; the same on all ranks.

        That is ``config.load_step``, or else the newest checkpoint whose files all have the size and hash that its
        manifest names; damaged ones are renamed to ``step-N.damaged`` and passed over. An explicit ``load_step`` that
        is missing or damaged is a ``CheckpointError``, and so is one whose config the contract does not let go on.
        """
        if not self.config.enable:
            return None
        if self.config.load_step == -1:
            step = self.newest_good_step()
        else:
            step = self.config.load_step
            if problem := self._problem(step):
                raise CheckpointError(f"checkpoint.load_step = {step} cannot be loaded: {problem}")
        if step is not None:
            saved_toml = self._agree((step_folder(self.folder, step) / CONFIG).read_text(encoding="utf-8"))
            for line in check_contract(saved_toml, self.config_toml, self.config.allow_changes):
                logger.info(line)
        self._take_over()
        return step

    def _take_over(self) -> None:
        """From here on this incarnation of the run saves, and no earlier one."""
        if self.rank == 0:
            self._claim = Claim.take(self.folder)
            for left_over in self.folder.glob(f"step-*{PARTIAL_SUFFIX}"):
                shutil.rmtree(left_over, ignore_errors=True)  # an earlier one may still be writing there
        self._generation = self._agree(self._claim.generation if self._claim is not None else 0)

    def newest_good_step(self) -> int | None:
        """The newest checkpoint whose files are what its manifest says; newer ones are set aside."""
        self.wait()
        for step in reversed(self._agree(saved_steps(self.folder))):
            problem = self._problem(step)
            if problem is None:
                return step
            if self.rank == 0:
                aside = set_aside(step_folder(self.folder, step), "damaged")
                logger.warning(f"checkpoint of step {step} is damaged, now {aside.name}: {problem}")
            dist.barrier(self.group)
        return None

    def _problem(self, step: int) -> str | None:
        """What is wrong with the checkpoint of ``step``, or None. Each rank reads its share of the files."""
        folder = step_folder(self.folder, step)
        problem = None
        try:
            for record in read_manifest(folder)[self.rank :: self.world_size]:
                problem = problem or verify_file(folder, record)
        except CheckpointError as error:
            problem = str(error)
            if not folder.exists():
                saved = ", ".join(map(str, saved_steps(self.folder))) or "none"
                problem = f"{folder} does not exist (steps in that folder: {saved})"
        return next((found for found in self._gather(problem) if found is not None), None)

    # Loading

    def load(self, step: int, only: Collection[str] = ()) -> None:
        """Write the checkpoint of ``step``, a good one, into the states; only into those in ``only``, if any are."""
        states = {name: state for name, state in self.states.items() if not only or name in only}
        tensors, folder = flatten(states), step_folder(self.folder, step)
        load_tensors(tensors, VerifiedReader(folder), folder, self.group)
        for name, state in states.items():
            state.load_state_dict(unflatten(tensors, name))
        # What is loaded in part is not what its checkpoint holds: it may have to be saved at that step again.
        self._newest = -1 if only else step
        logger.info(f"{'went back to' if only else 'resumed from'} {folder}")

    # Saving

    def maybe_save(self, step: int, last: bool = False) -> None:
        """Save if ``step`` is a multiple of ``config.interval``, or the ``last`` of the run, and not saved yet.

        By ``config.async_mode`` this returns when the state is copied, or when it is on disk, as the last one always
        is. A save that fails is logged and training goes on; ``config.max_failed_saves`` in a row, or a last one, raise
        ``CheckpointError``, and so does one of an incarnation that is no longer the newest (``SupersededError``).
        """
        if not (self.config.enable and (last or step % self.config.interval == 0)):
            return
        if step == self._newest:
            self.wait(last=last)  # asked to stop right after a save
            return
        started = time.perf_counter()
        self.wait()
        self._newest = step
        tensors = flatten(self.states)
        if self.config.async_mode == "disabled" or last:
            staged = {name: local_part(tensor) for name, tensor in tensors.items()}
        else:
            staged = self.stager.stage(tensors)
        self._pending = Future()
        # A daemon: a save that waits for a rank that failed must not keep the others from ending. The thread's
        # collectives keep their order because all ranks save at the same steps, and one save at a time.
        self._writer = threading.Thread(
            target=self._save_in_background, args=(self._pending, step, tensors, staged, started), daemon=True
        )
        self._writer.start()
        if self.config.async_mode == "disabled" or last:
            self.wait(last=last)

    def save_if_time(self, step: int, seconds_left: float) -> None:
        """Save the last step of a run that was asked to stop, unless earlier saves took longer than is left."""
        self.wait()  # its collectives and the next ones must not mix
        left = min(self._gather(seconds_left))
        expected = max(self._gather(self.seconds_of_last_save or 0.0))
        if self.config.enable and expected > left:
            logger.warning(f"step {step} is not saved: that takes about {expected:.0f} s, with {left:.0f} s left")
            return
        self.maybe_save(step, last=True)

    def before_update(self) -> None:
        """To be called before parameters change: a copy of them may still be under way (async_with_pinned_mem)."""
        self.stager.before_update()

    def wait(self, last: bool = False) -> None:
        """Block until the save under way is on disk. All ranks see the same outcome; ``maybe_save`` says which."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            self.seconds_of_last_save = pending.result()
            self._failed_in_a_row = 0
        except CheckpointError as error:
            self._failed_in_a_row += 1
            self._newest = -1
            if last or isinstance(error, SupersededError):
                raise
            if self._failed_in_a_row >= self.config.max_failed_saves:
                raise CheckpointError(
                    f"{error}; that is {self._failed_in_a_row} failed saves in a row, and checkpoint.max_failed_saves "
                    f"= {self.config.max_failed_saves}"
                ) from error

    def _save_in_background(self, done: Future[float], *save: Any) -> None:
        try:
            done.set_result(self._write(*save))
        except Exception as error:
            done.set_exception(error)
            return
        if self.rank == 0:
            # After the save counts as done: deleting can take longer than writing, and nobody need wait for it.
            self._delete_old()

    def _write(self, step: int, tensors: dict[str, Tensor], staged: dict[str, Tensor], started: float) -> float:
        """Write and commit ``staged``; returns the seconds since ``started``. ``tensors`` gives shapes and shards."""
        self.stager.wait()
        folder = step_folder(self.folder, step)
        writer = VerifiedWriter(folder, self.config_toml, lambda: self._make_room(step), self._generation)
        try:
            save_tensors(tensors, staged, writer, folder, self.group)
        except CheckpointError as error:
            if self.rank == 0 and not isinstance(error, SupersededError):
                logger.error(f"{error}; training goes on, and the last good checkpoint stays")
            raise
        seconds = time.perf_counter() - started
        if self.rank == 0:
            logger.info(f"saved {folder} in {seconds:.1f} s")
        return seconds

    def _make_room(self, step: int) -> None:
        """Rename checkpoints of later steps, and of this one: they lie on a path that the run left by going back.

        SupersededError if they are those of a newer incarnation of the run.
        """
        if self._claim is not None:
            self._claim.check()
        for later in saved_steps(self.folder):
            if later >= step:
                aside = set_aside(step_folder(self.folder, later), "superseded")
                logger.info(f"the run went back past step {later}: its earlier checkpoint is now {aside.name}")

    def _delete_old(self) -> None:
        complete = [step for step in saved_steps(self.folder) if (step_folder(self.folder, step) / MANIFEST).exists()]
        for step in complete[: -self.config.keep_latest_k] if self.config.keep_latest_k else []:
            folder = step_folder(self.folder, step)
            try:
                # Renamed first: what has its final name is complete at all times, also while it is being deleted.
                shutil.rmtree(folder.rename(folder.with_name(folder.name + PARTIAL_SUFFIX)))
            except OSError as error:
                logger.warning(f"{folder} is too old to keep but cannot be deleted: {error}")

    def close(self) -> None:
        """Wait for what is being written and deleted, then give up the process group."""
        self.wait()
        if self._writer is not None:
            self._writer.join()
        dist.destroy_process_group(self.group)

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._pending is not None:
            # What was good before the error may still become a checkpoint, if the other ranks live to write theirs.
            with suppress(Exception):
                self._pending.result(timeout=SECONDS_AFTER_ERROR)

    # Agreeing

    def _agree(self, value: T) -> T:
        """Rank 0's value, on all ranks: file systems need not show all of them the same at the same time."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def _gather(self, value: T) -> list[T]:
        values: list[T] = [value] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a folder under its final name, in order."""
    numbers = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def set_aside(folder: Path, why: str) -> Path:
    """Rename ``folder`` to ``<name>.<why>`` (``.<why>-2``, ... where that exists) and return the new path."""
    aside = folder.with_name(f"{folder.name}.{why}")
    count = 1
    while aside.exists():
        count += 1
        aside = folder.with_name(f"{folder.name}.{why}-{count}")
    return folder.rename(aside)
