"""Where a start of the run begins: which checkpoint it goes on from, and its claim to the folder.

Only the newest start of a run may write its checkpoints. Where a network splits, or a job is started twice, two starts
(incarnations) of one run are alive at once, and each file operation of the older one may wait for hours and then take
effect. So a start

1. claims the folder, by the next generation number, once it has found that it can resume;
2. then takes the temporary folders of older starts away from them (``outputs.discard``), so that these can no longer
   complete a checkpoint;
3. then looks again at what there is: from now on only it adds checkpoints.

It checks its claim before each checkpoint gets its final name, and before and after each rename of a checkpoint that
has it (``history.withdraw``).
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
# A rank that dies closes its connections, which the others see at once; a slow disk must not look like that.
GROUP_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class WriterLease:
    """A process that saves the checkpoints of a run; made by ``take``, on one rank. By default of nobody."""

    generation: int = 0
    id: str = ""
    """Two that start at once take the same generation: the last to write is the newest."""
    run: str = ""
    """Id of the run: the same through all its starts."""
    host: str = "?"
    process: int | str = "?"
    since: str = "?"

    @classmethod
    def take(cls, folder: Path, run: str | None) -> "WriterLease":
        """Become the newest incarnation of the run that saves in ``folder``. ``run``: its id, if checkpoints have it.

        Raises:
            CheckpointError: the file cannot be written.
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
            _remove_left_overs(folder, lambda: None)  # they may be what fills the disk
            claim._write(folder)
        _remove_left_overs(folder, lambda: claim.check(folder))
        return claim

    def check(self, folder: Path) -> None:
        """Raise SupersededError if another incarnation has started since; StorageError where that cannot be known."""
        newest = read_lease(folder)
        if not newest.id:
            self._write(folder)  # nobody has claimed the folder since the file was lost
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
            # Its temporary file is missing if another start took this one for dead.
            if error.errno in TRANSIENT_ERRNOS or isinstance(error, FileNotFoundError):
                raise StorageError(
                    f"{file} cannot be written: {error.strerror}. Start again when the file system answers"
                ) from error
            raise CheckpointError(
                f"{file} cannot be written ({error.strerror}), and so no checkpoint: make room or let this "
                "user write there, or take another job.dump_folder"
            ) from error


def _remove_left_overs(folder: Path, check: Callable[[], None]) -> None:
    """Remove what earlier starts were writing when they were killed; ``check`` is called before each removal.

    One of them may still be alive, and writing: then its save fails, and changes nothing else.

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
    """What the newest incarnation has written; an empty claim where there is nothing, or nothing of ours."""
    try:
        claim = WriterLease(**json.loads(read_file(folder / LEASE_FILE)))
    except (*MISSING, ValueError, TypeError):
        return WriterLease()
    return claim if isinstance(claim.generation, int) else WriterLease()


@dataclass(frozen=True)
class ResumePoint:
    """A start of the run; the same on all ranks but for ``group``."""

    group: dist.ProcessGroup
    """Of all ranks, over gloo, for checkpoints alone."""
    step: int | None = None
    """Of the newest checkpoint that is whole; None: a new run. Whether its tensors are good, a load will see."""
    candidates: Sequence[int] = ()
    """The steps to load, best first: where one is damaged, the next is taken."""
    claim: WriterLease = field(default_factory=WriterLease)
    """Where checkpoints are off, of nobody, for a run of which this is the only start."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Identity of the run's data and tokenizer by option."""
    found: Collection[int] = ()
    """Steps of the checkpoints that there were when it had claimed the folder."""


def find_resume_point(
    config: CheckpointConfig, folder: Path, config_toml: str, data: Callable[[], Mapping[str, str]] = dict
) -> ResumePoint:
    """Find the checkpoints to resume from in ``folder``, which all ranks share, and claim the folder. Collective.

    The step is that of the newest good checkpoint, or ``config.load_step``, or what a run that began with it has made
    since. With ``config.enable`` off, nothing is found and nothing claimed. Tensors are not read here:
    ``CheckpointManager.resume`` loads them.

    Args:
        config_toml: the resolved config of this start.
        data: gives the identity of the run's data and tokenizer by option; called on the first rank alone.

    Raises:
        CheckpointError: there are checkpoints, but none is good; ``load_step`` is missing or damaged; the contract
            does not let the run go on from there.
        StorageError: the file system fails.
    """
    group = new_gloo_group(GROUP_TIMEOUT)
    if not config.enable:
        return ResumePoint(group, claim=WriterLease(run=broadcast_from_rank0(lambda: uuid.uuid4().hex, group)))
    identity = broadcast_from_rank0(data, group)
    broadcast_from_rank0(lambda: restore(folder), group)

    def choose() -> tuple[list[int], int | None, str | None]:
        """The checkpoints to go on from, best first; the first of them that is whole, and the id of its run."""
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
        """The same, and of which ``versions``. A run that still saves here may delete what is being looked at."""
        for attempt in range(3):
            there = broadcast_from_rank0(lambda: versions(folder), group)
            try:
                return there, *choose()
            except CheckpointError:
                if attempt == 2 or there == broadcast_from_rank0(lambda: versions(folder), group):
                    raise
        raise AssertionError

    # Before the claim, which ends a run that still saves here: this start may yet be rejected.
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
    """Log how the config of the checkpoint of ``step`` differs from ``config_toml``. Collective.

    Raises:
        DamagedError: it has no config, or a damaged one.
        CheckpointError: the contract does not let the run go on from there.
    """
    folder = step_folder(history.folder, step)
    saved_toml, saved_data = broadcast_from_rank0(
        lambda: (read_config(folder), read_manifest(folder).data), history.group
    )
    for line in check_resume_compatibility(saved_toml, config_toml, config.allow_changes, saved_data, identity):
        logger.info(line)
