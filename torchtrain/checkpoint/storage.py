"""Where checkpoints are stored: the interface of a checkpoint storage, and the writer lease.

``checkpoint.folder`` is a path or a URL. The scheme of the URL selects the class in ``CHECKPOINT_STORAGES``
(``config/registry.py``); a path selects "file". docs/adding-a-checkpoint-storage.md adds one.

What is said of a checkpoint:

- complete: it was committed, with its manifest, after all its files. ``CheckpointStorage.steps`` lists it. It may have
  been damaged since.
- intact: it has a valid manifest, of this run and step, and all files with their sizes. ``History.check_intact`` checks
  that before a load, without reading the files.
- verified: the bytes that are used have the hashes in the manifest. ``VerifiedReader`` checks each piece that it reads,
  ``format.verify`` whole files.
- valid: intact, and verified as far as it was loaded. ``History.latest_valid`` finds the newest one.
- damaged: it is complete, but not valid. It is set aside, like one that was superseded: it keeps its files, and is not
  listed any more.
"""

import io
import os
import re
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torchtrain.config.registry import CHECKPOINT_STORAGES
from torchtrain.config.schema import JobConfig
from torchtrain.errors import SupersededError
from torchtrain.files import scheme_of

MANIFEST = "manifest.json"
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")  # below 2^63


@dataclass(frozen=True)
class WriterLease:
    """The exclusive right to write the checkpoints of a run, and the process that holds it.

    ``CheckpointStorage.acquire_lease`` acquires it, on one rank. The default values are an empty lease, which no
    process holds.
    """

    generation: int = 0
    id: str = ""
    """Unique id of the lease."""
    run: str = ""
    """Id of the run, the same for all its starts."""
    host: str = "?"
    process: int | str = "?"
    since: str = "?"


class StoredCheckpoint(ABC):
    """A complete checkpoint, for reading. Several threads may read it at once, and other ranks, as a pickled copy.

    All methods raise FileNotFoundError if the file is missing. Other errors of the class OSError are retried; a
    StorageError ends the load.
    """

    parallel_reads = 1
    """How many pieces of a file a rank reads at once."""

    def __init__(self, location: str) -> None:
        self.location = location
        """Path or URL, for messages."""

    def __str__(self) -> str:
        return self.location

    def path_of(self, name: str) -> str:
        """Path or URL of a file, for messages."""
        return f"{self.location}/{name}"

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open the file ``name`` for reading; it can seek."""

    def size_bytes(self, name: str) -> int:
        """Size of the file ``name``."""
        with self.open(name) as file:
            return file.seek(0, os.SEEK_END)

    def reopen(self, name: str, offset: int, length: int) -> BinaryIO:  # noqa: ARG002
        """Open a file again, whose range had other bytes than expected. They must not come from a cache."""
        return self.open(name)

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        with self.open(name) as file:
            return file.read()


class NewCheckpoint(ABC):
    """A checkpoint that is being written. Each rank has one for the same step and lease, and writes its own files."""

    parallel_files = 1
    """How many files a rank writes at once."""
    fsync = False
    """Whether the files that ``create`` returns have a descriptor to fsync before they are closed."""

    def __init__(self, location: str) -> None:
        self.location = location
        """Path or URL of the checkpoint once it is complete, for messages."""

    @property
    def problem(self) -> str:
        """What delays the writing now, for the report of a save that takes too long; empty if nothing is known."""
        return ""

    def prepare(self) -> None:  # noqa: B027
        """Called on rank 0 before any rank writes: remove what a failed save of this step has left."""

    @abstractmethod
    def create(self, name: str) -> BinaryIO:
        """Create the file ``name``, which no other rank writes.

        It is written from beginning to end, then closed. It is used as a context manager: after an error in its body it
        need not be stored.
        """

    @abstractmethod
    def commit(
        self,
        manifest: bytes,
        sizes: Mapping[str, int],
        before_commit: Callable[[], bool],
        require_lease: Callable[[], None],
    ) -> str:
        """Make the checkpoint complete. Called on rank 0 once all ranks have closed their files.

        Args:
            manifest: the content of ``manifest.json``.
            sizes: size in bytes of each file that must be there.
            before_commit: call it when everything else is stored, directly before the checkpoint becomes complete. It
                raises an error if this start may not write checkpoints, sets aside those of later steps that this one
                supersedes, and returns whether one of the same step is to be superseded.
            require_lease: see ``CheckpointStorage.set_aside``.

        Returns:
            The name that the superseded checkpoint has now; empty if there is none.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove what was written, if it did not become complete. Called on rank 0 when no rank is writing."""


class NewFile(io.BytesIO):
    """A file of a new checkpoint that is kept in memory, and given to ``store`` when it is closed.

    It is not stored if it is a context manager whose body raises an error.
    """

    def __init__(self, store: Callable[[bytes], object]) -> None:
        super().__init__()
        self._store = store

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            # First: Python closes the file again when it is deleted, if this fails.
            super().close()
            self._store(content)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:  # it is incomplete
            super().close()


class OutputCopies:
    """Copies of outputs, such as metrics, in a storage that outlives the disk of the dump folder; here none.

    All methods are called on rank 0.
    """

    def add_to_checkpoint(self, create: Callable[[str], AbstractContextManager[Any]]) -> None:
        """Add files to a checkpoint: ``create`` returns a context manager that yields a new binary file of a name."""

    def restore(self, checkpoint: StoredCheckpoint) -> None:
        """Restore outputs that the dump folder lacks from ``checkpoint``. Raises DamagedError."""

    def update(self, step: int) -> None:
        """Store what has changed, after the save of ``step``. Called in the thread of the save."""

    def store(self) -> None:
        """Store what has changed, at the end of the run."""


class CheckpointStorage(ABC):
    """Checkpoints and the writer lease of one run.

    A checkpoint is complete or absent: ``steps`` lists only complete ones. Methods that change anything are
    called on rank 0 only, and by the holder of the writer lease only.

    Raises:
        CheckpointError, ConfigError: a user can fix it, as by other rights.
        StorageError: the storage does not answer; the same command may succeed later.
    """

    keeps_notes = False
    """Whether ``write_note`` stores notes."""

    def __init__(self, location: str) -> None:
        self.location = location

    def __str__(self) -> str:
        return self.location

    def check_access(self) -> None:  # noqa: B027
        """Check before training begins that checkpoints can be written. Raises ConfigError or StorageError."""

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all checkpoints: ``step-N`` if they are complete, longer ones if they were set aside."""

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(int(match[1]) for match in map(STEP.fullmatch, self.names()) if match)

    def itself(self) -> StoredCheckpoint | None:
        """The checkpoint that the location is, if it is not a folder of checkpoints."""
        return None

    def has_manifest(self, step: int) -> bool:  # noqa: ARG002
        """Whether ``step``, one of ``steps``, has a manifest; retention does not count it otherwise."""
        return True

    @abstractmethod
    def open(self, step: int) -> StoredCheckpoint:
        """The checkpoint of ``step``, which may be missing."""

    @abstractmethod
    def new_checkpoint(self, step: int, lease: WriterLease) -> NewCheckpoint:
        """A new checkpoint of ``step``. Called equally often on each rank. No two of a rank may share their files."""

    @abstractmethod
    def set_aside(self, step: int, why: str, require_lease: Callable[[], None]) -> str:
        """Give the checkpoint of ``step`` another name, ``step-N.<why>`` or similar, and return it.

        ``why``: "damaged" or "superseded". ``require_lease`` raises SupersededError if a newer start has acquired the
        lease. Call it before the change, and if the change can take effect late, again after it, and then revert the
        change.

        Raises:
            OSError: the name cannot be changed.
        """

    @abstractmethod
    def delete(self, step: int, require_lease: Callable[[], None]) -> None:
        """Delete the checkpoint of ``step``; at no time is a part of it listed. ``require_lease``: as above."""

    @abstractmethod
    def read_lease(self) -> WriterLease:
        """The newest writer lease; an empty one if there is none."""

    @abstractmethod
    def write_lease(self, lease: WriterLease) -> None:
        """Store ``lease`` as the newest one.

        Raises:
            SupersededError: another start has stored a lease of this generation. Not every storage can detect this.
        """

    def store_export(self, folder: Path, origin: bytes) -> str:  # noqa: ARG002
        """Store an export of the weights in place of an earlier one, and return where it is.

        Args:
            folder: a local folder with the files of the export, which stays.
            origin: what ``read_export_origin`` returns from now on. It makes the export complete, so store it last.

        Returns:
            Path or URL for messages; empty if the storage keeps no exports: then it is only in the dump folder.
        """
        return ""

    def read_export_origin(self) -> bytes | None:
        """The ``origin`` of the stored export; empty if there is none, None if the storage keeps no exports."""
        return None

    def output_copies(
        self,
        folder: Path,  # noqa: ARG002
        names: Callable[[], Iterable[str]],  # noqa: ARG002
        write: Callable[[int], None],  # noqa: ARG002
    ) -> OutputCopies:
        """The copies of the outputs in the dump folder ``folder``.

        Args:
            names: returns files in ``folder`` to store besides the metrics.
            write: brings these files up to date, after the save of a step.
        """
        return OutputCopies()

    def write_note(self, name: str, content: bytes) -> None:  # noqa: B027
        """Store ``content``, less than 1 KiB, beside the checkpoints, in place of an earlier note of this name.

        By notes, processes that share nothing else know of each other. Each name has one writer, which needs no lease.
        A reader may get a part of a note that is being written. Does nothing unless ``keeps_notes``.
        """

    def read_notes(self) -> dict[str, bytes]:
        """The notes by name."""
        return {}

    def delete_note(self, name: str) -> None:  # noqa: B027
        """Delete a note, which may be missing."""

    def remove_left_overs(self, require_lease: Callable[[], None]) -> None:  # noqa: B027
        """Remove what killed starts have left; afterwards these can no longer complete a checkpoint.

        ``require_lease`` raises SupersededError if a newer start has acquired the lease. Call it before each removal.
        """

    def versions(self) -> dict[int, Hashable]:
        """By step, a value that changes if another checkpoint takes the place of this one."""
        return {step: str(self.open(step)) for step in self.steps()}

    def restore(self) -> None:  # noqa: B027
        """Complete or revert changes of names that a killed process was making. Called before ``steps``."""

    def acquire_lease(self, run: str | None, held: WriterLease | None = None) -> WriterLease:
        """Acquire the writer lease with the next generation number.

        Args:
            run: id of the run, as read from its checkpoints; None if they have none.
            held: the lease that this process has held so far, for an earlier stage of the run.

        Raises:
            CheckpointError: the lease cannot be written, or (SupersededError) another start acquires it.
            StorageError: the storage does not answer.
        """
        before = self.read_lease()
        if held is not None and before.id not in ("", held.id):
            raise superseded(before, held, self.location)
        lease = WriterLease(
            before.generation + 1,
            uuid.uuid4().hex,
            run or before.run or uuid.uuid4().hex,
            socket.gethostname(),
            os.getpid(),
            time.strftime("%Y-%m-%d %H:%M:%S"),
        )
        self.write_lease(lease)
        self.remove_left_overs(lambda: self.check_lease(lease))
        return lease

    def check_lease(self, lease: WriterLease) -> None:
        """Check that this start still holds ``lease``.

        Raises:
            SupersededError: another start has acquired the lease since.
            StorageError: the lease cannot be read.
        """
        newest = self.read_lease()
        if not newest.id:
            self.write_lease(lease)  # it was lost, and no other start has acquired the lease since
        elif newest.id != lease.id:
            raise superseded(newest, lease, self.location)


def superseded(newest: WriterLease, lease: WriterLease, location: str) -> SupersededError:
    """The error of the start with ``lease``, when another one has the ``newest`` lease."""
    return SupersededError(
        f"generation {newest.generation} of this run, on {newest.host} (process {newest.process}) since "
        f"{newest.since}, now saves to {location}; this one, generation {lease.generation}, stops. To train "
        "at the same time, use another job.dump_folder"
    )


def open_storage(location: str | Path) -> CheckpointStorage:
    """The storage of the checkpoints in ``location``, a path or a URL. Nothing is read yet.

    Raises:
        ConfigError: no storage is registered for the scheme of the URL, or a package is missing.
    """
    storage: CheckpointStorage = CHECKPOINT_STORAGES[scheme_of(location) or "file"](str(location))
    return storage


def checkpoint_storage(config: JobConfig) -> CheckpointStorage:
    """The storage of the checkpoints of the run with ``config``."""
    return open_storage(config.checkpoint.location(config.job.dump_folder))
