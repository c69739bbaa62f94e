"""List and verify the checkpoints in a run's folder, and rename damaged ones."""

import contextlib
import itertools
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch.distributed as dist

from torchtrain.checkpoint.manifest import read_manifest, read_verified, verify_sizes
from torchtrain.checkpoint.resume_compatibility import options_in
from torchtrain.checkpoint.storage import CONFIG
from torchtrain.config.parse import from_text
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.agreement import broadcast_from_rank0, gather_from_all_ranks
from torchtrain.errors import CheckpointError, ConfigError, DamagedError
from torchtrain.files import MISSING, dangling, names_in, printable, with_retries
from torchtrain.logging import logger

STEP = re.compile(r"step-(0|[1-9][0-9]*)")
# Temporary name of a checkpoint that is being renamed: see ``withdraw``.
MOVING = re.compile(rf"({STEP.pattern})\.[0-9a-f]{{8}}\.moving")
# Names of checkpoints: complete, found to be damaged, or superseded after a rollback.
ONCE_A_CHECKPOINT = re.compile(STEP.pattern + r"(\.(damaged|superseded)(-[0-9]+)?)?")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def saved_steps(folder: Path) -> list[int]:
    """Steps whose checkpoints have their final names in ``folder``, ascending.

    Raises:
        CheckpointError: ``folder`` is a dangling link.
    """
    names = names_in(folder)
    if not names and (problem := dangling(folder)):
        raise CheckpointError(problem)
    return sorted(int(match[1]) for match in map(STEP.fullmatch, names) if match)


def versions(folder: Path) -> dict[int, tuple[int, int]]:
    """Inode and modification time (ns) by step; they change if another checkpoint takes the name."""
    found = {}
    for step in saved_steps(folder):
        path = step_folder(folder, step)
        with contextlib.suppress(*MISSING):
            status = with_retries(lambda: os.stat(path), path)  # noqa: B023
            found[step] = (status.st_ino, status.st_mtime_ns)
    return found


def newest_config(folder: Path, load_step: int) -> JobConfig | None:
    """The config of the newest checkpoint, or of the one of ``load_step`` unless that is -1.

    A checkpoint without a valid config is skipped. None if there is none.
    """
    for step in reversed(saved_steps(folder)):
        if load_step in (-1, step):
            with contextlib.suppress(ConfigError, CheckpointError):
                return from_text(read_config(step_folder(folder, step)), str(step_folder(folder, step) / CONFIG))
    return None


def read_config(folder: Path) -> str:
    """Read the config of the run that wrote the checkpoint in ``folder``, as TOML.

    Raises:
        DamagedError: the config is missing or damaged.
    """
    content = read_verified(folder, CONFIG)
    try:
        text = content.decode()
        options_in(text)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{folder / CONFIG} is no config of a run ({printable(str(error))})") from error
    return text


class History:
    """The checkpoints in ``folder``, a folder that the ranks of ``group`` share. All methods are collective."""

    def __init__(self, folder: Path, group: dist.ProcessGroup, run: str) -> None:
        """``run``: id of the run that saves in ``folder``; empty if unknown."""
        self.folder = folder
        self.group = group
        self.run = run

    def candidates(self, load_step: int = -1) -> list[int]:
        """Steps to resume from, best first.

        If ``load_step`` is -1, these are all checkpoints. Otherwise they are ``load_step`` and the later steps that a
        run with the same ``load_step`` has reached from there.
        """

        def begun_there(step: int) -> bool:
            try:
                options = options_in(read_config(step_folder(self.folder, step)))
            except DamagedError:
                return True  # first_good will detect the damage
            return bool(options.get("checkpoint.load_step") == load_step)

        def find() -> list[int]:
            steps = saved_steps(self.folder)[::-1]
            if load_step == -1:
                return steps
            # From the newest one backward, up to the first one of another run: earlier ones are superseded.
            since = itertools.takewhile(begun_there, (step for step in steps if step > load_step))
            return [*since, *(step for step in steps if step == load_step)]

        return broadcast_from_rank0(find, self.group)

    def first_good(self, steps: Iterable[int], use: Callable[[int], None]) -> tuple[int | None, dict[int, str]]:
        """Find the first of ``steps`` whose checkpoint is valid: neither ``check`` nor ``use`` raises DamagedError.

        ``use`` is collective, and raises DamagedError on all ranks or on none.

        Returns:
            The step, or None if there is none; and the errors of the damaged checkpoints before it, by step.
        """
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                self.check(step)
                use(step)
            except DamagedError as error:
                damaged[step] = str(error)
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
            saved = ", ".join(map(str, broadcast_from_rank0(lambda: saved_steps(self.folder), self.group))) or "none"
            missing = f"{step_folder(self.folder, load_step)} does not exist (steps in that folder: {saved})"
            raise CheckpointError(
                f"checkpoint.load_step = {load_step} cannot be loaded: {damaged.get(load_step, missing)}"
            )
        names = broadcast_from_rank0(
            lambda: [n for n in names_in(self.folder) if ONCE_A_CHECKPOINT.fullmatch(n)], self.group
        )
        if not names:
            return
        why = f"; {damaged[max(damaged)]}" if damaged else ""
        raise CheckpointError(
            f"{self.folder} holds {', '.join(names)}, and none of these is a good checkpoint{why}. A new run does not "
            "begin over them: repair one, or take another job.dump_folder (or remove them, to begin anew here)"
        )

    def check(self, step: int) -> None:
        """Check that the checkpoint of ``step`` is complete and belongs to this run. Its tensors are not read.

        Raises, on all ranks:
            DamagedError: it is incomplete, or belongs to another run or step.
            StorageError: a rank cannot read it.
        """

        def check_share() -> None:
            folder = step_folder(self.folder, step)
            manifest = read_manifest(folder)
            if manifest.step not in (None, step):
                raise DamagedError(f"{folder} is the checkpoint of step {manifest.step} under another name")
            if manifest.run and self.run and manifest.run != self.run:
                raise DamagedError(f"{folder} is that of another run")
            verify_sizes(folder, manifest.files[dist.get_rank(self.group) :: dist.get_world_size(self.group)])

        gather_from_all_ranks(check_share, self.group)

    def quarantine(self, damaged: Mapping[int, str], check: Callable[[], None]) -> None:
        """Rename the ``damaged`` checkpoints and log a warning. Called once an older one has been loaded.

        ``damaged``: errors by step. ``check``: see ``withdraw``.
        """

        def rename() -> None:
            for step, problem in damaged.items():
                folder = step_folder(self.folder, step)
                try:
                    name = quarantine(withdraw(folder, check), folder, "damaged").name
                except OSError as error:
                    logger.warning(
                        f"checkpoint of step {step} is damaged: {problem}; {folder} cannot be renamed: {error}"
                    )
                else:
                    logger.warning(f"checkpoint of step {step} is damaged, and renamed to {name}: {problem}")

        broadcast_from_rank0(rename, self.group)


def withdraw(folder: Path, check: Callable[[], None]) -> Path:
    """Rename the checkpoint ``folder`` to the temporary name ``<name>.ID.moving`` and return the new path.

    ``check`` raises SupersededError if a newer start has acquired the writer lease. It is called before the rename and
    again after it: the rename may be delayed by the file system until a newer start has saved a checkpoint under this
    name, and then it moves that one. In that case the name is restored. If this process is killed meanwhile, the next
    start restores the name (``restore``). Therefore rename a withdrawn checkpoint again before removing any of its
    files.
    """
    check()
    moving = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.moving")
    folder.rename(moving)
    try:
        check()
    except BaseException:
        with contextlib.suppress(OSError):
            moving.rename(folder)
        raise
    return moving


def restore(folder: Path) -> None:
    """Restore the names of checkpoints in ``folder`` that a process was renaming when it was killed.

    If that process is still alive, its next rename fails, and is retried at its next save.
    """
    for match in filter(None, map(MOVING.fullmatch, names_in(folder))):
        moving, final = folder / match[0], folder / match[1]
        try:
            moving.rename(final)
            logger.info(f"{moving} was being renamed when its process was killed: it is {final.name} again")
        except FileNotFoundError:
            continue  # the process is still alive, and has renamed it
        except OSError:  # another checkpoint has this name
            with contextlib.suppress(OSError):
                quarantine(moving, final, "superseded")


def quarantine(moving: Path, folder: Path, why: str) -> Path:
    """Rename ``moving``, the withdrawn checkpoint ``folder``, to ``<folder>.<why>`` and return the new path.

    If that name exists, ``<folder>.<why>-2``, ``<folder>.<why>-3``, ... are tried.
    """
    aside = folder.with_name(f"{folder.name}.{why}")
    count = 1
    while os.path.lexists(aside):
        count += 1
        aside = folder.with_name(f"{folder.name}.{why}-{count}")
    return moving.rename(aside)
