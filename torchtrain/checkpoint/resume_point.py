"""Select the checkpoint to resume from and acquire the writer lease.

Only the newest start of a run may write its checkpoints. If a network splits, or a job is started twice, two starts of
one run are alive at once, and any file operation of the older one may be delayed for hours and then take effect.
Therefore a start

1. acquires the writer lease, with the next generation number, once it has verified that it can resume;
2. then removes the temporary folders of older starts (``files.discard``), so that these can no longer complete a
   checkpoint;
3. then lists the checkpoints again: from now on, no other start adds any.

It checks its lease before each checkpoint gets its final name, and before and after it renames an existing checkpoint
(``history.withdraw``).
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from torchtrain.checkpoint.history import History, read_config, restore, step_folder, versions
from torchtrain.checkpoint.manifest import read_manifest
from torchtrain.checkpoint.resume_compatibility import check_resume_compatibility
from torchtrain.config.schema import CheckpointConfig
from torchtrain.distributed.agreement import broadcast_from_rank0
from torchtrain.distributed.connections import new_gloo_group
from torchtrain.errors import CheckpointError, StorageError, SupersededError
from torchtrain.files import (
    MISSING,
    NO_SPACE,
    PARTIAL_SUFFIX,
    TRANSIENT_ERRNOS,
    atomic_write,
    discard,
    names_in,
    read_file,
)
from torchtrain.logging import logger

LEASE_FILE = "generation.json"
BEING_WRITTEN_SECONDS = 60  # another start may be writing a temporary file younger than this
# The other ranks detect a dead rank at once, by its closed connections. The timeout only has to tolerate slow disks.
GROUP_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class WriterLease:
    """The exclusive right to write the checkpoints of a run, and the process that holds it.

    ``take`` acquires it, on one rank. The default values are an empty lease, which no process holds.
    """

    generation: int = 0
    id: str = ""
    """Unique id of the lease. Two starts at the same time may take the same generation: the last to write holds it."""
    run: str = ""
    """Id of the run, the same for all its starts."""
    host: str = "?"
    process: int | str = "?"
    since: str = "?"

    @classmethod
    def take(cls, folder: Path, run: str | None) -> "WriterLease":
        """Acquire the writer lease of ``folder``.

        Args:
            folder: the folder of checkpoints.
            run: id of the run, as read from its checkpoints; None if they have none.

        Raises:
            CheckpointError: the lease file cannot be written.
            StorageError: the file system fails.
        """
        before = read_lease(folder)
        claim = cls(
            before.generation + 1,
            uuid.uuid4().hex,
            run or before.run or uuid.uuid4().hex,
            socket.gethostname(),
            os.getpid(),
            time.strftime("%Y-%m-%d %H:%M:%S"),
        )
        try:
            claim._write(folder)
        except CheckpointError as error:
            if getattr(error.__cause__, "errno", None) not in NO_SPACE:
                raise
            _remove_left_overs(folder, lambda: None)  # leftovers may be filling the disk
            claim._write(folder)
        _remove_left_overs(folder, lambda: claim.check(folder))
        return claim

    def check(self, folder: Path) -> None:
        """Check that this start still holds the lease.

        Raises:
            SupersededError: another start has acquired the lease since.
            StorageError: the lease file cannot be read.
        """
        newest = read_lease(folder)
        if not newest.id:
            self._write(folder)  # the file was lost, and no other start has acquired the lease since
        elif newest.id != self.id:
            raise SupersededError(
                f"generation {newest.generation} of this run, on {newest.host} (process {newest.process}) since "
                f"{newest.since}, now saves in {folder}; this one, generation {self.generation}, stops. To train "
                "beside it, take another job.dump_folder"
            )

    def _write(self, folder: Path) -> None:
        file = folder / LEASE_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as written:
                written.write(json.dumps(asdict(self)).encode())
        except OSError as error:
            # The temporary file is missing if another start has removed it as a leftover.
            if error.errno in TRANSIENT_ERRNOS or isinstance(error, FileNotFoundError):
                raise StorageError(
                    f"{file} cannot be written: {error.strerror}. Start again when the file system answers"
                ) from error
            raise CheckpointError(
                f"{file} cannot be written ({error.strerror}), and so no checkpoint: make room or let this "
                "user write there, or take another job.dump_folder"
            ) from error


def _remove_left_overs(folder: Path, check: Callable[[], None]) -> None:
    """Remove the temporary files of earlier starts, which these were writing when they were killed.

    ``check`` is called before each temporary folder is removed. If an earlier start is still alive and writing, its
    save fails, without further effects.

    Raises:
        StorageError: the file system fails.
    """
    for name in names_in(folder):
        path = folder / name
        if name.startswith("step-") and name.endswith(PARTIAL_SUFFIX):
            check()
            try:
                discard(path, folder / name.split(".", 1)[0])
            except OSError as error:
                if error.errno in TRANSIENT_ERRNOS:
                    raise StorageError(
                        f"{path}, which an earlier start has left, cannot be renamed: {error.strerror}. Start again "
                        "when the file system answers"
                    ) from error
                logger.warning(f"{path}, which an earlier start has left, cannot be removed: {error.strerror}")
        elif name.startswith(f"{LEASE_FILE}."):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > BEING_WRITTEN_SECONDS:
                    path.unlink()


def read_lease(folder: Path) -> WriterLease:
    """Read the current lease of ``folder``; an empty lease if the file is missing or has another content."""
    try:
        claim = WriterLease(**json.loads(read_file(folder / LEASE_FILE)))
    except (*MISSING, ValueError, TypeError):
        return WriterLease()
    return claim if isinstance(claim.generation, int) else WriterLease()


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from and the writer lease; identical on all ranks except for ``group``."""

    group: dist.ProcessGroup
    """Process group of all ranks over gloo, used only for checkpoints."""
    step: int | None = None
    """Step of the newest complete checkpoint; None for a new run. Its tensors are verified only when it is loaded."""
    candidates: Sequence[int] = ()
    """Steps to try to load, best first: if one is damaged, the next is loaded."""
    claim: WriterLease = field(default_factory=WriterLease)
    """The writer lease; without checkpoints, a lease that no process holds, with a new id of the run."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Identity of the run's data and tokenizer, by option name."""
    found: Collection[int] = ()
    """Steps of the checkpoints that existed right after the lease was acquired."""


def find_resume_point(
    config: CheckpointConfig, folder: Path, config_toml: str, data: Callable[[], Mapping[str, str]] = dict
) -> ResumePoint:
    """Select the checkpoint in ``folder`` to resume from, and acquire the writer lease. Collective.

    All ranks share ``folder``. The selected step is the newest complete checkpoint; or, if ``config.load_step`` is set,
    that step or the newest one that a run with the same ``load_step`` has reached from there. If ``config.enable`` is
    false, no checkpoint is looked for and no lease acquired. Tensors are not read here: ``CheckpointManager.resume``
    loads them.

    Args:
        config_toml: the resolved config of this start.
        data: returns the identity of the run's data and tokenizer by option name; called on rank 0 only.

    Raises:
        CheckpointError: there are checkpoints, but none is valid; the checkpoint of ``load_step`` is missing or
            damaged; or the config is incompatible with the checkpoint.
        StorageError: the file system fails.
    """
    group = new_gloo_group(GROUP_TIMEOUT)
    if not config.enable:
        return ResumePoint(group, claim=WriterLease(run=broadcast_from_rank0(lambda: uuid.uuid4().hex, group)))
    identity = broadcast_from_rank0(data, group)
    broadcast_from_rank0(lambda: restore(folder), group)

    def choose() -> tuple[list[int], int | None, str | None]:
        """The candidates to resume from, best first; the first complete one, and the id of its run."""
        history = History(folder, group, broadcast_from_rank0(lambda: read_lease(folder).run, group))
        candidates = history.candidates(config.load_step)
        step, damaged = history.first_good(
            candidates, lambda step: check_resume(history, step, config, config_toml, identity)
        )
        if step is None:
            history.require_none(config.load_step, damaged)
            return candidates, None, None
        found = step_folder(folder, step)
        return candidates, step, broadcast_from_rank0(lambda: read_manifest(found).run, group)

    def choose_before_claim() -> tuple[dict[int, tuple[int, int]], list[int], int | None, str | None]:
        """The ``versions`` of the checkpoints and the result of ``choose``.

        Retries if the checkpoints change meanwhile: another start that still saves here may delete the ones being read.
        """
        for attempt in range(3):
            there = broadcast_from_rank0(lambda: versions(folder), group)
            try:
                return there, *choose()
            except CheckpointError:
                if attempt == 2 or there == broadcast_from_rank0(lambda: versions(folder), group):
                    raise
        raise AssertionError

    # Before acquiring the lease, which stops a start that still saves here: this start may still be rejected.
    before, candidates, step, run = choose_before_claim()
    claim = broadcast_from_rank0(lambda: WriterLease.take(folder, run), group)
    there = broadcast_from_rank0(lambda: versions(folder), group)
    if there != before:
        candidates, step, _ = choose()
    if config.load_step not in (-1, step):
        logger.info(
            f"checkpoint.load_step = {config.load_step}: goes on from step {step}, which a run with this load_step has "
            f"come to. To go back to step {config.load_step} once more, move the checkpoints of later steps away"
        )
    return ResumePoint(group, step, candidates, claim, identity, tuple(there))


def check_resume(
    history: History, step: int, config: CheckpointConfig, config_toml: str, identity: Mapping[str, str]
) -> None:
    """Check that the run can resume from the checkpoint of ``step`` and log the differences of its config. Collective.

    Raises:
        DamagedError: the checkpoint has no config, or a damaged one.
        CheckpointError: the config is incompatible with the checkpoint.
    """
    folder = step_folder(history.folder, step)
    saved_toml, saved_data = broadcast_from_rank0(
        lambda: (read_config(folder), read_manifest(folder).data), history.group
    )
    for line in check_resume_compatibility(saved_toml, config_toml, config.allow_changes, saved_data, identity):
        logger.info(line)
