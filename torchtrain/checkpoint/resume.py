"""Select the checkpoint to resume from and acquire the writer lease.

Only the newest start of a run may write its checkpoints. If a network splits, or a job is started twice, two starts of
one run are alive at once, and any file operation of the older one may be delayed for hours and then take effect.
Therefore a start

1. acquires the writer lease, with the next generation number, once it has verified that it can resume;
2. then removes what older starts were writing (``CheckpointStorage.remove_left_overs``), so that these can no longer
   complete a checkpoint;
3. then lists the checkpoints again: from now on, no other start adds any.

It checks its lease before each checkpoint gets its final name, and before and after it renames an existing checkpoint
(``local_storage.withdraw``).
"""

import itertools
import json
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from torchtrain.checkpoint.format import DATA_FILES, Manifest, read_manifest, read_verified, verify_sizes
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.resume_compatibility import (
    EXCLUDE,
    check_resume_compatibility,
    differences,
    options_in,
    same_content,
    source_identities,
)
from torchtrain.checkpoint.saved_run import read_config_text
from torchtrain.checkpoint.storage import CheckpointStorage, StoredCheckpoint, WriterLease
from torchtrain.config.parse import from_text
from torchtrain.config.run_plan import OtherStageError, plan_of
from torchtrain.datasets.data_identity import FileTable, as_json, describe_changes, from_json
from torchtrain.distributed.agreement import broadcast_from_rank0, gather_from_all_ranks
from torchtrain.distributed.connections import new_gloo_group
from torchtrain.errors import CheckpointError, ConfigError, DamagedError
from torchtrain.files import parse_json, printable
from torchtrain.logging import logger
from torchtrain.optimizers.lr_schedule import LRSchedule

LARGE_RATE_CHANGE = 1.5  # a factor that is logged
MAX_ATTEMPTS = 10  # to read checkpoints that another start replaces meanwhile
# The other ranks detect a dead rank at once, by its closed connections. The timeout only has to tolerate slow disks.
GROUP_TIMEOUT = timedelta(hours=1)


class History:
    """The checkpoints in ``storage``, which the ranks of ``group`` share. All methods are collective."""

    def __init__(self, storage: CheckpointStorage, group: dist.ProcessGroup, run: str) -> None:
        """``run``: id of the run that saves in ``storage``; empty if unknown."""
        self.storage = storage
        self.group = group
        self.run = run

    def candidates(self, load_step: int = -1) -> list[int]:
        """Steps to resume from, best first.

        If ``load_step`` is -1, these are all checkpoints. Otherwise they are ``load_step`` and the later steps that a
        run with the same ``load_step`` has reached from there.
        """

        def begun_there(step: int) -> bool:
            try:
                options = options_in(read_config_text(self.storage.open(step)))
            except DamagedError:
                return True  # latest_valid will detect the damage
            return bool(options.get("checkpoint.load_step") == load_step)

        def find() -> list[int]:
            steps = self.storage.steps()[::-1]
            if load_step == -1:
                return steps
            # From the newest one backward, up to the first one of another run: earlier ones are superseded.
            since = itertools.takewhile(begun_there, (step for step in steps if step > load_step))
            return [*since, *(step for step in steps if step == load_step)]

        return broadcast_from_rank0(find, self.group)

    def latest_valid(self, steps: Iterable[int], use: Callable[[int], None]) -> tuple[int | None, dict[int, str]]:
        """Find the first of ``steps`` whose checkpoint is valid: ``check_intact`` and ``use`` raise no DamagedError.

        ``use`` is collective, and raises DamagedError on all ranks or on none.

        Returns:
            The step, or None if there is none; and the errors of the damaged checkpoints before it, by step.
        """
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                self.check_intact(step)
                use(step)
            except DamagedError as error:
                damaged[step] = str(error)
            except OtherStageError as error:
                error.damaged = damaged
                raise
            else:
                return step, damaged
        return None, damaged

    def require_none(self, load_step: int, damaged: Mapping[int, str]) -> None:
        """Raise CheckpointError if a valid checkpoint is expected, because none was found.

        One is expected if ``load_step`` is set, or if the folder has any checkpoint, damaged and superseded ones
        included: then a run has already started here.

        ``damaged``: the errors of the ``candidates`` for ``load_step``, by step.
        """
        if load_step != -1:
            saved = ", ".join(map(str, broadcast_from_rank0(self.storage.steps, self.group))) or "none"
            checkpoint = broadcast_from_rank0(lambda: self.storage.open(load_step), self.group)
            missing = f"{checkpoint} does not exist (steps in that folder: {saved})"
            raise CheckpointError(
                f"checkpoint.load_step = {load_step} cannot be loaded: {damaged.get(load_step, missing)}"
            )
        names = broadcast_from_rank0(self.storage.names, self.group)
        if not names:
            return
        why = f"; {damaged[max(damaged)]}" if damaged else ""
        raise CheckpointError(
            f"{self.storage} contains {', '.join(names)}, and none of these is a valid checkpoint{why}. A new run does "
            "not replace them: repair one, use another job.dump_folder, or remove them to start a new run here"
        )

    def check_intact(self, step: int) -> None:
        """Check that the checkpoint of ``step`` is intact (see ``storage.py``). Its tensors are not read.

        Raises, on all ranks:
            DamagedError: it is incomplete, or belongs to another run or step.
            StorageError: a rank cannot read it.
        """

        # Opened on one rank: it costs requests, and ranks may see different states.
        checkpoint = broadcast_from_rank0(lambda: self.storage.open(step), self.group)

        def check_share() -> None:
            manifest = read_manifest(checkpoint)
            if manifest.step not in (None, step):
                raise DamagedError(f"{checkpoint} is the checkpoint of step {manifest.step} under another name")
            if manifest.run and self.run and manifest.run != self.run:
                raise DamagedError(f"{checkpoint} is that of another run")
            verify_sizes(checkpoint, manifest.files[dist.get_rank(self.group) :: dist.get_world_size(self.group)])

        gather_from_all_ranks(check_share, self.group)

    def quarantine(
        self,
        damaged: Mapping[int, str],
        require_lease: Callable[[], None],
        may_rename: Callable[[int, Mapping[int, Hashable]], bool],
    ) -> None:
        """Rename the ``damaged`` checkpoints and log a warning. Called once an older one has been loaded.

        Args:
            damaged: errors by step.
            require_lease: see ``CheckpointStorage.set_aside``.
            may_rename: whether this start may rename the checkpoint of a step, given the ``versions`` of all; called on
                rank 0.
        """

        def rename() -> None:
            versions = self.storage.versions() if damaged else {}
            for step, problem in damaged.items():
                if not may_rename(step, versions):
                    continue
                checkpoint = self.storage.open(step)
                try:
                    name = self.storage.set_aside(step, "damaged", require_lease)
                except OSError as error:
                    logger.warning(
                        f"checkpoint of step {step} is damaged: {problem}; {checkpoint} cannot be renamed: {error}"
                    )
                else:
                    logger.warning(f"checkpoint of step {step} is damaged, and renamed to {name}: {problem}")

        broadcast_from_rank0(rename, self.group)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from and the writer lease; identical on all ranks except for ``group``."""

    group: dist.ProcessGroup
    """Process group of all ranks over gloo, used only for checkpoints."""
    step: int | None = None
    """Step of the newest intact checkpoint; None for a new run. Its tensors are verified only when it is loaded."""
    candidates: Sequence[int] = ()
    """Steps to try to load, best first: if one is damaged, the next is loaded."""
    lease: WriterLease = field(default_factory=WriterLease)
    """The writer lease; without checkpoints, a lease that no process holds, with a new id of the run."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Identity of the run's data and tokenizer, by option name."""
    data_files: bytes = as_json([])
    """The files of each source, as ``data_identity.as_json``."""
    found: Mapping[int, Hashable] = field(default_factory=dict)
    """The checkpoints that existed right after the lease was acquired, as ``CheckpointStorage.versions``; none if it
    was not acquired."""


@dataclass
class HeldLease:
    """The writer lease that this process holds. The stages of a run share it, so that none takes it from a newer start.

    A stage acquires a lease of its own, and only if the process still holds the one of the stage before.
    """

    lease: WriterLease | None = None


def find_resume_point(
    config: CheckpointConfig,
    storage: CheckpointStorage,
    config_toml: str,
    data: Callable[[], Mapping[str, str]] = dict,
    held: HeldLease | None = None,
    data_files: Callable[[], Sequence[FileTable]] = tuple,
    takes_lease: bool = True,
    group: dist.ProcessGroup | None = None,
    is_same_run: Callable[[Mapping[str, str]], bool] = lambda _: True,
) -> ResumePoint:
    """Select the checkpoint in ``storage`` to resume from, and acquire the writer lease. Collective.

    All ranks share ``storage``. The selected step is that of the newest intact checkpoint; or, if ``config.load_step``
    is set, that step or the newest one that a run with the same ``load_step`` has reached from there. If
    ``config.enable`` is false, no checkpoint is looked for and no lease acquired. Tensors are not read here:
    ``CheckpointManager.resume`` loads them.

    Args:
        config_toml: the resolved config of this start.
        data: returns the identity of the run's data and tokenizer by option name; called on rank 0 only.
        held: the lease that this process has held for an earlier stage; that of this stage replaces it.
        data_files: returns the files of each source; called on rank 0 only.
        takes_lease: whether the lease is acquired now; else by ``CheckpointManager.take_lease``, before a save.
        group: that of an earlier call in this process; None: a new one is created.
        is_same_run: whether an earlier start, which has saved no checkpoint, was of this run, given the identity of its
            data; called on rank 0 only. If not, this start is a new run, with an id of its own.

    Raises:
        CheckpointError: there are checkpoints, but none is valid; the checkpoint of ``load_step`` is missing or
            damaged; the config is incompatible with the checkpoint; or (SupersededError) a newer start has acquired the
            lease since this process acquired ``held``.
        StorageError: the file system fails.
    """
    group = group or new_gloo_group(GROUP_TIMEOUT)
    if not config.enable:
        return ResumePoint(group, lease=WriterLease(run=broadcast_from_rank0(lambda: uuid.uuid4().hex, group)))
    identity = broadcast_from_rank0(data, group)
    tables = broadcast_from_rank0(lambda: as_json(data_files()), group)
    broadcast_from_rank0(storage.restore, group)

    def choose() -> tuple[list[int], int | None, str | None]:
        """The candidates to resume from, best first; the first intact one, and the id of its run."""
        history = History(storage, group, broadcast_from_rank0(lambda: storage.read_lease().run, group))
        candidates = history.candidates(config.load_step)
        step, damaged = history.latest_valid(
            candidates, lambda step: check_resume(history, step, config, config_toml, identity, tables)
        )
        if step is None:
            history.require_none(config.load_step, damaged)
            return candidates, None, None
        return candidates, step, broadcast_from_rank0(lambda: read_manifest(storage.open(step)).run, group)

    def choose_before_lease() -> tuple[dict[int, Hashable], list[int], int | None, str | None]:
        """The ``versions`` of the checkpoints and the result of ``choose``.

        Retries if the checkpoints change meanwhile: another start that still saves here may delete the ones being read.
        """
        for attempt in range(MAX_ATTEMPTS):
            there = broadcast_from_rank0(storage.versions, group)
            try:
                return there, *choose()
            except CheckpointError:
                if attempt == MAX_ATTEMPTS - 1 or there == broadcast_from_rank0(storage.versions, group):
                    raise
        raise AssertionError

    # Before acquiring the lease, which stops a start that still saves here: this start may still be rejected.
    before, candidates, step, run = choose_before_lease()
    held = held or HeldLease()

    def acquire() -> WriterLease:
        if takes_lease:
            is_new = step is None and not is_same_run(identity)
            return storage.acquire_lease(uuid.uuid4().hex if is_new else run, held.lease)
        return WriterLease(run=run or storage.read_lease().run or uuid.uuid4().hex)

    lease = held.lease = broadcast_from_rank0(acquire, group)
    # Without the lease, others may still save, and delete checkpoints while they are read once more.
    there = broadcast_from_rank0(storage.versions, group) if takes_lease else {}
    if takes_lease and there != before:
        candidates, step, _ = choose()
    if config.load_step not in (-1, step):
        logger.info(
            f"checkpoint.load_step = {config.load_step}: resumes from step {step}, which a run with this load_step has "
            f"come to. To go back to step {config.load_step} once more, move the checkpoints of later steps away"
        )
    return ResumePoint(group, step, candidates, lease, identity, tables, there)


def check_resume(
    history: History,
    step: int,
    config: CheckpointConfig,
    config_toml: str,
    identity: Mapping[str, str],
    data_files: bytes,
) -> None:
    """Check that the run can resume from the checkpoint of ``step`` and log the differences of its config. Collective.

    Raises:
        DamagedError: the checkpoint has no config, or a damaged one.
        CheckpointError: the config is incompatible with the checkpoint.
        OtherStageError: another stage of the run has saved the checkpoint.
    """
    checkpoint = broadcast_from_rank0(lambda: history.storage.open(step), history.group)

    def read() -> tuple[str, Mapping[str, str], list[str]]:
        manifest = read_manifest(checkpoint)
        changed_files = _changed_files(checkpoint, manifest, identity, data_files)
        return read_config_text(checkpoint), manifest.data, changed_files

    saved_toml, saved_data, changed_files = broadcast_from_rank0(read, history.group)
    plan = plan_of(from_text(config_toml, "config.toml"))
    of_stage = plan.config_of_saved_stage(saved_toml, step, config.allow_changes)
    if of_stage != config_toml:
        # Sources of the next stage come after those of the last.
        count = len(source_identities(saved_data))
        identity = {
            key: "; ".join(text.split("; ")[:count]) if key.startswith("data.") else text
            for key, text in identity.items()
            if key != EXCLUDE  # the next stage may leave out other documents
        }
    for line in check_resume_compatibility(
        saved_toml, of_stage, config.allow_changes, saved_data, identity, changed_files
    ):
        logger.info(line)
    if change := rate_change(saved_toml, of_stage, step):
        logger.warning(change)


def rate_change(saved_toml: str, current_toml: str, step: int) -> str:
    """A message if the learning rate after ``step`` is far from that of the schedule in the checkpoint; else ""."""
    schedules = []
    for text in (saved_toml, current_toml):
        config = from_text(text, "config.toml", only_known=True, checked=False)
        try:
            schedules.append(LRSchedule(config.lr_scheduler, config.optimizer.lr, config.training.steps))
        except ConfigError:  # of a plugin that is not installed any more, or has other options now
            return ""
    expected, rate = (schedule.rate(step + 1) for schedule in schedules)
    low, high = sorted((expected, rate))
    if high <= LARGE_RATE_CHANGE * low:
        return ""
    options = sorted(
        of.key for of in differences(saved_toml, current_toml) if of.key.startswith(("lr_scheduler.", "optimizer.lr"))
    )
    return (
        f"the learning rate changes to {rate:.3g} in step {step + 1}: with the checkpoint's options it would be "
        f"{expected:.3g}, and step {step} had {schedules[0].rate(step):.3g} (changed: {', '.join(options)})"
    )


def _changed_files(
    checkpoint: StoredCheckpoint, manifest: Manifest, identity: Mapping[str, str], data_files: bytes
) -> list[str]:
    """For each source of ``checkpoint`` that has other content now, the files that have changed; else "".

    Raises:
        DamagedError: the table of files in the checkpoint is missing or damaged.
    """
    pairs = zip(source_identities(manifest.data), source_identities(identity), strict=False)
    is_same = [same_content(saved, current) for saved, current in pairs]
    if all(is_same) or DATA_FILES not in {record.name for record in manifest.files}:
        return []
    path = checkpoint.path_of(DATA_FILES)
    content = parse_json(read_verified(checkpoint, DATA_FILES), path, DamagedError)
    try:
        saved_tables = from_json(content)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise DamagedError(f"{path} is not a table of data files ({printable(str(error))})") from error
    tables = zip(is_same, saved_tables, from_json(json.loads(data_files)), strict=False)
    return ["" if same else describe_changes(saved, current) for same, saved, current in tables]
