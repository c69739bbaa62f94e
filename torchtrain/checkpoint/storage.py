"""The checkpoints in a folder: their names, and the lease of the run that writes them."""

import contextlib
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtrain.errors import CheckpointError, StorageError, SupersededError
from torchtrain.files import (
    MISSING,
    NO_SPACE,
    PARTIAL_SUFFIX,
    TRANSIENT_ERRNOS,
    atomic_write,
    dangling,
    discard,
    names_in,
    read_file,
    with_retries,
)
from torchtrain.logging import logger

STEP = re.compile(r"step-(0|[1-9][0-9]*)")
# Temporary name of a checkpoint that is being renamed: see ``withdraw``.
MOVING = re.compile(rf"({STEP.pattern})\.[0-9a-f]{{8}}\.moving")
# Names of checkpoints: complete, found to be damaged, or superseded after a rollback.
ONCE_A_CHECKPOINT = re.compile(STEP.pattern + r"(\.(damaged|superseded)(-[0-9]+)?)?")
LEASE_FILE = "generation.json"
BEING_WRITTEN_SECONDS = 60  # another start may be writing a temporary file younger than this


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
        lease = cls(
            before.generation + 1,
            uuid.uuid4().hex,
            run or before.run or uuid.uuid4().hex,
            socket.gethostname(),
            os.getpid(),
            time.strftime("%Y-%m-%d %H:%M:%S"),
        )
        try:
            lease._write(folder)
        except CheckpointError as error:
            if getattr(error.__cause__, "errno", None) not in NO_SPACE:
                raise
            _remove_left_overs(folder, lambda: None)  # leftovers may be filling the disk
            lease._write(folder)
        _remove_left_overs(folder, lambda: lease.check(folder))
        return lease

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
                f"{newest.since}, now saves to {folder}; this one, generation {self.generation}, stops. To train "
                "at the same time, use another job.dump_folder"
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
                    f"{file} cannot be written: {error.strerror}. Start again when the file system responds"
                ) from error
            raise CheckpointError(
                f"{file} cannot be written ({error.strerror}), so no checkpoint can be saved: free disk space, allow "
                "this user to write there, or use another job.dump_folder"
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
                        "when the file system responds"
                    ) from error
                logger.warning(f"{path}, which an earlier start has left, cannot be removed: {error.strerror}")
        elif name.startswith(f"{LEASE_FILE}."):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > BEING_WRITTEN_SECONDS:
                    path.unlink()


def read_lease(folder: Path) -> WriterLease:
    """Read the current lease of ``folder``; an empty lease if the file is missing or has another content."""
    try:
        lease = WriterLease(**json.loads(read_file(folder / LEASE_FILE)))
    except (*MISSING, ValueError, TypeError):
        return WriterLease()
    return lease if isinstance(lease.generation, int) else WriterLease()
