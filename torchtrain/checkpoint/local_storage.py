"""Checkpoints in a folder that all ranks share: ``step-N`` folders, renamed when they are complete.

A checkpoint is written into ``step-N.ID.partial``, where ID is the id of the writer lease. When all files are flushed
to disk, the folder is renamed to ``step-N``.
"""

import contextlib
import io
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, cast

from torchtrain.checkpoint.storage import (
    MANIFEST,
    STEP,
    CheckpointStorage,
    NewCheckpoint,
    StoredCheckpoint,
    WriterLease,
)
from torchtrain.errors import CheckpointError, DamagedError, StorageError
from torchtrain.files import (
    BLOCK_BYTES,
    MISSING,
    NO_SPACE,
    PARTIAL_SUFFIX,
    TRANSIENT_ERRNOS,
    atomic_write,
    dangling,
    discard,
    fsync_folder,
    is_own_file,
    json_object,
    local_path,
    names_in,
    read_file,
    require_folder,
    with_retries,
)
from torchtrain.logging import logger

# Temporary name of a checkpoint that is being renamed: see ``withdraw``.
MOVING = re.compile(rf"({STEP.pattern})\.[0-9a-f]{{8}}\.moving")
# Names of checkpoints: complete, found to be damaged, or superseded after a rollback.
ONCE_A_CHECKPOINT = re.compile(STEP.pattern + r"(\.(damaged|superseded)(-[0-9]+)?)?")
LEASE_FILE = "generation.json"
NOTES = "notes"  # the folder of ``write_note``
BEING_WRITTEN_SECONDS = 60  # another start may be writing a temporary file younger than this


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


class LocalCheckpoint(StoredCheckpoint):
    """The checkpoint in the folder ``path``."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path

    def size_bytes(self, name: str) -> int:
        path = self.path / name
        if not with_retries(lambda: is_own_file(path), path):
            raise DamagedError(f"{path} is not a file of its own folder")
        return with_retries(lambda: path.stat().st_size, path)

    def open(self, name: str) -> BinaryIO:
        return (self.path / name).open("rb")

    def reopen(self, name: str, offset: int, length: int) -> BinaryIO:
        file = self.open(name)
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_DONTNEED)
        return file

    def read(self, name: str) -> bytes:
        return read_file(self.path / name, DamagedError)


class _NewFile(io.BufferedWriter):
    """A new file, whose writes only go forward."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "x"))  # which follows no link
        self._size_bytes = 0
        self._size_sent_bytes = 0

    def write(self, data: Any) -> int:
        self._size_bytes += super().write(data)
        if self._size_bytes - self._size_sent_bytes >= BLOCK_BYTES:
            self._send()
        return len(data)

    def _send(self) -> None:
        """Let the disk begin with what was written since the last call, so that it does not idle until the fsync."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            length = self._size_bytes - self._size_sent_bytes
            # To drop pages, Linux first starts writing them, and does not wait for that.
            os.posix_fadvise(super().fileno(), self._size_sent_bytes, length, os.POSIX_FADV_DONTNEED)
            self._size_sent_bytes = self._size_bytes

    def fileno(self) -> int:
        # Whoever asks for the descriptor is about to fsync: Python's own buffer must be empty before that.
        self.flush()
        return super().fileno()


class LocalNewCheckpoint(NewCheckpoint):
    """A checkpoint that is written into the folder ``partial`` and renamed to ``path``.

    ``partial`` must be the same on all ranks. Two starts of a run never write into the same one.
    """

    fsync = True

    def __init__(self, path: Path, partial: Path | None = None) -> None:
        super().__init__(str(path))
        self.path = path
        self.partial = partial or path.with_name(f"{path.name}.0{PARTIAL_SUFFIX}")
        self._has_folder = False
        self._created: list[str] = []  # names of the files of this rank

    def prepare(self) -> None:
        self.discard()
        self.partial.mkdir(parents=True)
        self._has_folder = True

    def create(self, name: str) -> BinaryIO:
        if not self._has_folder:  # the other ranks may not see it yet
            self.partial.mkdir(exist_ok=True)
            self._has_folder = True
        self._created.append(name)
        return cast(BinaryIO, _NewFile(self.partial / name))

    def commit(
        self,
        manifest: bytes,
        sizes: Mapping[str, int],
        before_commit: Callable[[], bool],
        require_lease: Callable[[], None],
    ) -> str:
        for name in sizes:
            file = self.partial / name
            if not file.exists():
                raise CheckpointError(
                    f"{file} was written by another rank but is not seen by this one: the dump folder must lie on a "
                    "file system that all nodes share"
                )
        with open(self.partial / MANIFEST, "wb", opener=_open_no_link) as manifest_file:
            manifest_file.write(manifest)
        # The other ranks have flushed their files; fsync of a file that was flushed before costs nothing.
        fsync_folder(self.partial, *self._created, MANIFEST)
        moving = None
        if before_commit():
            moving = withdraw(self.path, require_lease)
        try:
            if moving is not None:
                require_lease()
            self._verify_sizes(sizes)  # a start that considers this run dead may have removed some
            self.partial.rename(self.path)
        except BaseException:
            if moving is not None:
                with suppress(OSError):
                    moving.rename(self.path)  # it may be the only checkpoint
            raise
        aside = ""
        if moving is not None:
            with suppress(OSError):  # if it fails, the next start of the run renames it
                aside = quarantine(moving, self.path, "superseded").name
        fsync_folder(self.path.parent)
        return aside

    def _verify_sizes(self, sizes: Mapping[str, int]) -> None:
        written = LocalCheckpoint(self.partial)
        for name, size in sizes.items():
            try:
                found = written.size_bytes(name)
            except MISSING as error:
                raise DamagedError(f"{written.path_of(name)} is missing ({error.strerror})") from error
            if found != size:
                raise DamagedError(f"{written.path_of(name)} has {found} bytes; its manifest says {size}")

    def discard(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class LocalStorage(CheckpointStorage):
    """``step-N`` folders in ``folder``."""

    keeps_notes = True

    def __init__(self, location: str) -> None:
        super().__init__(location)
        folder = local_path(location)
        assert folder is not None, "the scheme of its URL is file"
        self.folder = folder

    def check_access(self) -> None:
        if os.path.lexists(self.folder):
            require_folder(self.folder, str(self.folder))

    def steps(self) -> list[int]:
        return saved_steps(self.folder)

    def has_manifest(self, step: int) -> bool:
        return (step_folder(self.folder, step) / MANIFEST).exists()

    def open(self, step: int) -> LocalCheckpoint:
        return LocalCheckpoint(step_folder(self.folder, step))

    def new_checkpoint(self, step: int, lease: WriterLease) -> LocalNewCheckpoint:
        path = step_folder(self.folder, step)
        return LocalNewCheckpoint(path, path.with_name(f"{path.name}.{lease.id}{PARTIAL_SUFFIX}"))

    def set_aside(self, step: int, why: str, require_lease: Callable[[], None]) -> str:
        path = step_folder(self.folder, step)
        return quarantine(withdraw(path, require_lease), path, why).name

    def delete(self, step: int, require_lease: Callable[[], None]) -> None:
        path = step_folder(self.folder, step)
        # Rename before deleting, so that a folder with its final name is always complete.
        discard(withdraw(path, require_lease), path)

    def versions(self) -> dict[int, Hashable]:
        """Inode and modification time (ns) of the manifest by step, which are others if another checkpoint is there."""
        found: dict[int, Hashable] = {}
        for step in self.steps():
            path = step_folder(self.folder, step)
            with suppress(*MISSING):
                file = path / MANIFEST if (path / MANIFEST).exists() else path
                status = with_retries(lambda: os.stat(file), file)  # noqa: B023
                found[step] = (status.st_ino, status.st_mtime_ns)
        return found

    def names(self) -> list[str]:
        return [name for name in names_in(self.folder) if ONCE_A_CHECKPOINT.fullmatch(name)]

    def restore(self) -> None:
        """Restore the names of checkpoints that a process was renaming when it was killed.

        If that process is still alive, its next rename fails, and is retried at its next save.
        """
        for match in filter(None, map(MOVING.fullmatch, names_in(self.folder))):
            moving, final = self.folder / match[0], self.folder / match[1]
            try:
                moving.rename(final)
                logger.info(f"{moving} was being renamed when its process was killed: it is {final.name} again")
            except FileNotFoundError:
                continue  # the process is still alive, and has renamed it
            except OSError:  # another checkpoint has this name
                with suppress(OSError):
                    quarantine(moving, final, "superseded")

    def read_lease(self) -> WriterLease:
        """Read the current lease; an empty lease if the file is missing or has another content."""
        try:
            lease = WriterLease(**(json_object(read_file(self.folder / LEASE_FILE)) or {}))
        except (*MISSING, TypeError):
            return WriterLease()
        return lease if isinstance(lease.generation, int) else WriterLease()

    def write_lease(self, lease: WriterLease) -> None:
        """Write the lease file. Two starts at the same time may take the same generation: the last to write holds it.

        Raises:
            CheckpointError: the lease file cannot be written.
            StorageError: the file system fails.
        """
        try:
            self._write_lease(lease)
        except CheckpointError as error:
            if getattr(error.__cause__, "errno", None) not in NO_SPACE:
                raise
            self.remove_left_overs(lambda: None)  # leftovers may be filling the disk
            self._write_lease(lease)

    def _write_lease(self, lease: WriterLease) -> None:
        file = self.folder / LEASE_FILE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as written:
                written.write(json.dumps(asdict(lease)).encode())
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

    def write_note(self, name: str, content: bytes) -> None:
        # In place: over NFS, a name may refer for up to a minute to a file that another one has replaced.
        path = self.folder / NOTES / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}") from error

    def read_notes(self) -> dict[str, bytes]:
        found = {}
        for name in names_in(self.folder / NOTES):
            with suppress(*MISSING):  # deleted meanwhile
                found[name] = read_file(self.folder / NOTES / name)
        return found

    def delete_note(self, name: str) -> None:
        with suppress(OSError):
            (self.folder / NOTES / name).unlink()

    def remove_left_overs(self, require_lease: Callable[[], None]) -> None:
        """Remove the temporary files of earlier starts, which these were writing when they were killed.

        If an earlier start is still alive and writing, its save fails, without further effects.
        """
        for name in names_in(self.folder):
            path = self.folder / name
            if name.startswith("step-") and name.endswith(PARTIAL_SUFFIX):
                require_lease()
                try:
                    discard(path, self.folder / name.split(".", 1)[0])
                except OSError as error:
                    if error.errno in TRANSIENT_ERRNOS:
                        raise StorageError(
                            f"{path}, which an earlier start has left, cannot be renamed: {error.strerror}. Start "
                            "again when the file system responds"
                        ) from error
                    logger.warning(f"{path}, which an earlier start has left, cannot be removed: {error.strerror}")
            elif name.startswith(f"{LEASE_FILE}."):
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > BEING_WRITTEN_SECONDS:
                        path.unlink()


def saved_steps(folder: Path) -> list[int]:
    """Steps whose checkpoints have their final names in ``folder``, ascending.

    Raises:
        CheckpointError: ``folder`` is a dangling link.
    """
    names = names_in(folder)
    if not names and (problem := dangling(folder)):
        raise CheckpointError(problem)
    return sorted(int(match[1]) for match in map(STEP.fullmatch, names) if match)


def withdraw(folder: Path, require_lease: Callable[[], None]) -> Path:
    """Rename the checkpoint ``folder`` to the temporary name ``<name>.ID.moving`` and return the new path.

    ``require_lease`` raises SupersededError if a newer start has acquired the writer lease. It is called before the
    rename and again after it: the rename may be delayed by the file system until a newer start has saved a checkpoint
    under this name, and then it moves that one. In that case the name is restored. If this process is killed meanwhile,
    the next start restores the name (``LocalStorage.restore``). Therefore rename a withdrawn checkpoint again before
    removing any of its files.
    """
    require_lease()
    moving = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.moving")
    folder.rename(moving)
    try:
        require_lease()
    except BaseException:
        with contextlib.suppress(OSError):
            moving.rename(folder)
        raise
    return moving


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
