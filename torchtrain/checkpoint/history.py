"""The checkpoints in a run's folder: which exist, which are good, and the renaming of damaged ones."""

import contextlib
import itertools
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path

import tomli
import torch.distributed as dist

from torchtrain.checkpoint.manifest import read_manifest, verify
from torchtrain.checkpoint.storage import CONFIG
from torchtrain.config.parse import from_file
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.agreement import of_all_ranks, of_first_rank
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.log import logger
from torchtrain.outputs import dangling
from torchtrain.reading import MISSING, names_in, patiently, read_file

STEP = re.compile(r"step-(0|[1-9][0-9]*)")
# On its way to another name: see ``withdraw``.
MOVING = re.compile(rf"({STEP.pattern})\.[0-9a-f]{{8}}\.moving")
# A name that a checkpoint has or had: complete, found damaged, or left behind by a run that went back.
ONCE_A_CHECKPOINT = re.compile(STEP.pattern + r"(\.(damaged|superseded)(-[0-9]+)?)?")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a folder under its final name, in order. CheckpointError if ``folder`` is a dangling link."""
    names = names_in(folder)
    if not names and (problem := dangling(folder)):
        raise CheckpointError(problem)
    return sorted(int(match[1]) for match in map(STEP.fullmatch, names) if match)


def versions(folder: Path) -> dict[int, tuple[int, int]]:
    """For each of ``saved_steps`` what changes when another checkpoint gets its name."""
    found = {}
    for step in saved_steps(folder):
        path = step_folder(folder, step)
        with contextlib.suppress(*MISSING):
            status = patiently(lambda: os.stat(path), path)  # noqa: B023
            found[step] = (status.st_ino, status.st_mtime_ns)
    return found


def newest_config(folder: Path, load_step: int) -> JobConfig | None:
    """The config of the checkpoint that a run will try first. It is not verified here."""
    for step in reversed(saved_steps(folder)):
        if load_step in (-1, step):
            with contextlib.suppress(ConfigError):
                return from_file(str(step_folder(folder, step) / CONFIG))
    return None


def read_config(folder: Path) -> str:
    """The config of the run that has made the checkpoint in ``folder``; CheckpointError where it has none."""
    file = folder / CONFIG
    try:
        return read_file(file).decode()
    except (*MISSING, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): this is no whole checkpoint") from error


class History:
    """The checkpoints in ``folder``, which the ranks of ``group`` share. All methods are collective."""

    def __init__(self, folder: Path, group: dist.ProcessGroup, run: str) -> None:
        """``run``: id of the run that saves in ``folder``; empty where it is not known."""
        self.folder = folder
        self.group = group
        self.run = run
        self.damaged: dict[int, str] = {}
        """What is wrong with those that ``newest_good`` has passed over. Empty where it has found no good one."""

    def newest_good(self, among: Callable[[int], bool] = lambda _: True) -> int | None:
        """The newest checkpoint that passes verification. ``among(step)``: whether to consider it."""
        damaged: dict[int, str] = {}
        for step in filter(among, reversed(of_first_rank(lambda: saved_steps(self.folder), self.group))):
            problem = self.problem(step)
            if problem is None:
                self.damaged = damaged
                return step
            damaged[step] = problem
        return None

    def newest_since(self, load_step: int) -> int:
        """``load_step``, or the newest step that a run with the same ``load_step`` has come to from there."""

        def begun_there(step: int) -> bool:
            try:
                saved = tomli.loads(read_config(step_folder(self.folder, step)))
            except (CheckpointError, tomli.TOMLDecodeError):
                return True  # damaged, as will be found
            return bool(saved.get("checkpoint", {}).get("load_step") == load_step)

        def find() -> tuple[list[int], set[int]]:
            steps = saved_steps(self.folder)
            # From the newest backwards, up to the first one of another run: earlier ones are of a path that was left.
            later = (step for step in reversed(steps) if step > load_step)
            return steps, set(itertools.takewhile(begun_there, later))

        steps, since = of_first_rank(find, self.group)
        step = self.newest_good(since.__contains__)
        if step is not None:
            logger.info(
                f"checkpoint.load_step = {load_step}: goes on from step {step}, which a run with this load_step has "
                f"come to. To go back to step {load_step} once more, move the checkpoints of later steps away"
            )
            return step
        if load_step not in steps:
            saved = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(
                f"checkpoint.load_step = {load_step} cannot be loaded: {step_folder(self.folder, load_step)} does not "
                f"exist (steps in that folder: {saved})"
            )
        if problem := self.problem(load_step):
            raise CheckpointError(f"checkpoint.load_step = {load_step} cannot be loaded: {problem}")
        return load_step

    def require_none(self) -> None:
        """Raise CheckpointError if the folder holds anything that is or was a checkpoint: a run began here before."""
        names = of_first_rank(lambda: [n for n in names_in(self.folder) if ONCE_A_CHECKPOINT.fullmatch(n)], self.group)
        if not names:
            return
        steps = of_first_rank(lambda: saved_steps(self.folder), self.group)
        why = f"; {self.problem(steps[-1])}" if steps else ""
        raise CheckpointError(
            f"{self.folder} holds {', '.join(names)}, and none of these is a good checkpoint{why}. A new run does not "
            "begin over them: repair one, or take another job.dump_folder (or remove them, to begin anew here)"
        )

    def problem(self, step: int) -> str | None:
        """What is wrong with the checkpoint of ``step``, or None. Each rank reads its share of the files.

        Raises:
            StorageError: on all ranks, if one of them cannot read its share.
        """

        def verify_share() -> None:
            folder = step_folder(self.folder, step)
            manifest = read_manifest(folder)
            if manifest.step not in (None, step):
                raise CheckpointError(f"{folder} is the checkpoint of step {manifest.step} under another name")
            if manifest.run and self.run and manifest.run != self.run:
                raise CheckpointError(f"{folder} is that of another run")
            verify(folder, manifest.files[dist.get_rank(self.group) :: dist.get_world_size(self.group)])

        try:
            of_all_ranks(verify_share, self.group)
        except CheckpointError as error:
            return str(error)
        return None

    def set_damaged_aside(self, check: Callable[[], None]) -> None:
        """Rename the ``damaged`` ones, with a warning. ``check``: see ``withdraw``."""

        def rename() -> None:
            for step, problem in self.damaged.items():
                folder = step_folder(self.folder, step)
                try:
                    name = set_aside(withdraw(folder, check), folder, "damaged").name
                except OSError as error:
                    logger.warning(
                        f"checkpoint of step {step} is damaged: {problem}; {folder} cannot be renamed: {error}"
                    )
                else:
                    logger.warning(f"checkpoint of step {step} is damaged, and renamed to {name}: {problem}")

        of_first_rank(rename, self.group)


def withdraw(folder: Path, check: Callable[[], None]) -> Path:
    """Rename the checkpoint ``folder`` to ``<name>.ID.moving`` and return the new path.

    ``check`` raises SupersededError if a newer start has claimed the folder of checkpoints. It is called before, and
    again after: a rename may wait for the file system while a newer start saves a checkpoint of this name, and then
    takes that one. In that case, the name is given back. If this process is killed meanwhile, the next start does so
    (``restore``): a checkpoint that was withdrawn is to be renamed again before anything in it is removed.
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
    """Give back the names of checkpoints in ``folder`` that a process was moving when it was killed.

    It may be alive: then its next rename fails, and is tried again at its next save.
    """
    for match in filter(None, map(MOVING.fullmatch, names_in(folder))):
        moving, final = folder / match[0], folder / match[1]
        try:
            moving.rename(final)
            logger.info(f"{moving} was being renamed when its process was killed: it is {final.name} again")
        except FileNotFoundError:
            continue  # it was alive
        except OSError:  # there is another one of this name
            with contextlib.suppress(OSError):
                set_aside(moving, final, "superseded")


def set_aside(moving: Path, folder: Path, why: str) -> Path:
    """Rename ``moving``, which was ``folder``, to ``<folder>.<why>`` (``.<why>-2``, ... where that exists).

    Returns the new path.
    """
    aside = folder.with_name(f"{folder.name}.{why}")
    count = 1
    while os.path.lexists(aside):
        count += 1
        aside = folder.with_name(f"{folder.name}.{why}-{count}")
    return moving.rename(aside)
