"""Checkpoints in an object store such as S3, Google Cloud Storage or Azure, through fsspec.

Object stores have neither folders nor renames, but strong consistency and conditional creates: of several requests that
create the same object, one succeeds. The objects below ``checkpoint.folder`` are

    lease/00000003.json                       the writer lease of generation 3, and the checkpoints that count
    step-500.3-1f0c.2/__0_0_0.distcp, ...     second save of generation 3
    step-500.3-1f0c.2/manifest.json           created last: now the checkpoint is complete
    step-400.2-77ab.1.superseded.3            a marker of generation 3: the checkpoint does not count any more
    outputs/metrics.jsonl, ...                copies of metrics and reports after the last save; no start reads them
    notes/NAME                                small files by which processes of the run know of each other

Only what the newest lease allows counts: the checkpoints that its record names, and the checkpoints and markers of the
generations from ``since`` on. When a start acquires the lease, ``since`` is the generation of the previous start, which
may just have completed a checkpoint. The start then lists everything once more, and stores the record again: with what
it has found, and its own generation as ``since``. From then on no request of an older start has an effect, however late
it arrives; and if the start is killed before that, the next one does it. Everything else of older starts is removed.
Folders ``step-N`` without a generation, as somebody copies them from a local folder, count unless the run itself has
saved that step, and are never removed as left-overs.
"""

import errno
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

from torchtrain.checkpoint.storage import (
    MANIFEST,
    STEP,
    CheckpointStorage,
    NewCheckpoint,
    NewFile,
    StoredCheckpoint,
    WriterLease,
    superseded,
)
from torchtrain.errors import CheckpointError, ConfigError, DamagedError, StorageError
from torchtrain.files import MISSING, json_object
from torchtrain.logging import logger
from torchtrain.plugins.object_storage.object_store import (
    MIN_ATTEMPTS,
    error_code,
    missing_bucket,
    open_file_system,
    upload_file,
    with_store_retries,
    with_timeout,
)
from torchtrain.plugins.object_storage.outputs import BucketCopies

# step-N, or step-N.<generation>-<id of the lease>.<number of the save>
PREFIX = re.compile(STEP.pattern + r"(?:\.([1-9][0-9]*)-([0-9a-f]{8})\.([1-9][0-9]*))?")
MARKER = re.compile(rf"({STEP.pattern}(?:\.[0-9a-f.-]+)?)\.(damaged|superseded|deleted)\.([1-9][0-9]*)")
LEASE_FILE = re.compile(r"[0-9]{8,}\.json")
ACCESS_FILE = re.compile(r"access-[0-9a-f]{32}")  # see ``ObjectStore.check_access``
OUTPUTS = "outputs"  # folder of the copies of metrics and reports
NOTES = "notes"  # folder of ``write_note``
EXPORT, EXPORT_ORIGIN = "hf", "hf_made_from.json"  # folder of the export, and what it was made from
HEAD_METHODS = ("info", "cat_file")  # of fsspec, which begin with a HEAD request
REQUESTS = 8  # at a time
FILES_AT_ONCE = 4  # which a rank writes, or reads
RANGES_AT_ONCE = 4  # of one file
RANGE_BYTES = 16 * 2**20  # size of a range read; smaller reads are served from one


class ObjectStore:
    """The objects below a URL, with retries. Names are relative to it.

    All methods raise FileNotFoundError for a missing object, ConfigError without rights or without a bucket, and
    StorageError if the store does not answer.
    """

    def __init__(self, url: str, option: str) -> None:
        self.url = url.rstrip("/")
        self.option = option
        self.problem = ""
        """Why the last request that failed was repeated, while it has not succeeded."""

    def __reduce__(self) -> Any:  # the file system has threads and connections
        return ObjectStore, (self.url, self.option)

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        return open_file_system(self.url, self.option)

    def _request(self, method: str, name: str, *args: Any, size_bytes: int = 0, **options: Any) -> Any:
        """Call a method of the file system. ``size_bytes``: size of what it transfers."""
        file_system, root = self._opened
        path = f"{root}/{name}" if name else root
        call = partial(with_timeout(file_system, method, size_bytes), path, *args, **options)
        # S3's answer to a HEAD request does not say whether the object is missing, or the bucket for a moment: repeat.
        for attempts_left in (1, 0) if method in HEAD_METHODS else (0,):
            try:
                result = with_store_retries(call, self.url_of(name), on_retry=partial(setattr, self, "problem"))
                break
            except MISSING as error:
                if reason := missing_bucket(error):
                    # Taken for an empty one, a start would begin a new run, and remove the checkpoints later.
                    raise ConfigError(
                        f"{self.option} = {self.url!r} cannot be used: {reason}; create the bucket, or start again "
                        "once the store has it: nothing is lost"
                    ) from error
                if not attempts_left:
                    raise
        self.problem = ""
        return result

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def names(self, folder: str = "") -> dict[str, bool]:
        """Names of the objects (False) and folders (True) in ``folder``; none if it does not exist."""
        try:
            entries = self._request("ls", folder, detail=True)
        except MISSING:
            return {}
        names = ((entry["name"].rstrip("/").rpartition("/")[2], entry["type"] == "directory") for entry in entries)
        return {name: is_folder for name, is_folder in names if name}

    def files(self, folder: str) -> dict[str, int]:
        """Size in bytes of each object directly in ``folder``, by name."""
        try:
            entries = self._request("ls", folder, detail=True)
        except MISSING:
            return {}
        return {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in entries if entry["type"] == "file"}

    def exists(self, name: str) -> bool:
        try:
            self.size_bytes(name)
        except MISSING:
            return False
        return True

    def is_whole(self, name: str, content: bytes) -> bool:
        """Whether the store has kept all bytes of what was written; also True if it was deleted since."""
        try:
            return self.size_bytes(name) == len(content)
        except MISSING:
            return True

    def size_bytes(self, name: str) -> int:
        return int(self._request("info", name)["size"])

    def read(self, name: str) -> bytes:
        return bytes(self._request("cat_file", name))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """The bytes from ``start`` to ``end``; fewer at the end of the object."""
        return bytes(self._request("cat_file", name, start=start, end=end, size_bytes=end - start))

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object."""
        upload_lost = False
        while True:
            try:
                self._request("pipe_file", name, content, size_bytes=len(content))
                return
            except FileNotFoundError as error:
                # A multipart upload is missing if another start has aborted it, or if its completion was repeated
                # because the answer was lost.
                if upload_lost or "NoSuchUpload" not in map(error_code, (error, error.__cause__)):
                    raise
                upload_lost = True

    def create(self, name: str, content: bytes) -> None:
        """Create an object. Raises FileExistsError if there is another one of this name."""
        try:
            self._request("pipe_file", name, content, mode="create", size_bytes=len(content))
        except FileExistsError as error:
            # If the answer to the first attempt was lost, the second one finds the object of the first.
            try:
                found = self.read(name)
            except MISSING:  # deleted meanwhile
                raise error from None
            if found != content:
                raise

    def upload(self, folder: Path, target: str = "", *, last: Sequence[str]) -> None:
        """Upload the files in a local ``folder``; those named in ``last`` at the end, in this order."""

        def order(file: Path) -> tuple[int, str]:
            return last.index(file.name) if file.name in last else -1, file.name

        for file in sorted(folder.iterdir(), key=order):
            self.upload_file(file, f"{target}/{file.name}".lstrip("/"))

    def upload_file(self, file: Path, name: str) -> None:
        """Upload a local file, and check that the store has it whole."""
        file_system, root = self._opened
        upload_file(file_system, file, f"{root}/{name}", self.url_of(name))

    def check_access(self) -> None:
        """Create an object, check that it cannot be created again, and delete it. Raises ConfigError."""
        for _ in range(MIN_ATTEMPTS):
            name = f"access-{uuid4().hex}"
            try:
                self.create(name, b"first")
                self.create(name, b"second")
            except FileExistsError:
                self.delete(name)
                return
            except MISSING as error:
                raise ConfigError(f"{self.option} = {self.url!r} cannot be used: {error}") from error
            self.delete(name)  # or another start has removed the first one as a left-over: try again
        raise ConfigError(
            f"{self.option} = {self.url!r} cannot be used: the store ignores the condition of a request to "
            "create an object only if there is none (If-None-Match), so that two starts could write there at once"
        )

    def delete(self, name: str) -> None:
        with suppress(*MISSING):
            self._request("rm_file", name)

    def key(self, name: str) -> str:
        """The key of an object in its bucket."""
        return f"{self._opened[1].partition('/')[2]}/{name}".lstrip("/")

    def uploads(self) -> list[dict[str, str]]:
        """Unfinished multipart uploads below the URL; none in other stores than S3."""
        file_system, root = self._opened
        if not hasattr(file_system, "call_s3"):
            return []
        found: list[dict[str, str]] = []
        options = {"Bucket": root.partition("/")[0], "Prefix": self.key("")}
        while True:
            request = partial(with_timeout(file_system, "call_s3"), "list_multipart_uploads", **options)
            page = with_store_retries(request, self.url)
            found += page.get("Uploads", [])
            if not page.get("IsTruncated"):
                return found
            options |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort_upload(self, upload: Mapping[str, str]) -> None:
        file_system, root = self._opened
        options = {"Bucket": root.partition("/")[0], "Key": upload["Key"], "UploadId": upload["UploadId"]}
        with suppress(*MISSING):
            abort = partial(with_timeout(file_system, "call_s3"), "abort_multipart_upload", **options)
            with_store_retries(abort, self.url)

    def delete_folder(self, folder: str) -> None:
        """Delete all objects in ``folder``, first the manifest: what has lost other files must not seem complete."""
        self.delete(f"{folder}/{MANIFEST}")
        names = [name for name, is_folder in self.names(folder).items() if not is_folder]
        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(self.delete, (f"{folder}/{name}" for name in names)))


class ObjectFile(io.RawIOBase):
    """An object as a file for reading, by range reads. Large reads are split into parallel requests."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.store, self.name = store, name
        self.position = 0
        self._block, self._block_start = b"", 0
        self._known_size_bytes: int | None = None

    def _size_bytes(self) -> int:
        # Not a cached_property, which lets only one thread at a time ask for any size, up to Python 3.11.
        if self._known_size_bytes is None:
            self._known_size_bytes = self.store.size_bytes(self.name)
        return self._known_size_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            offset += self.position if whence == io.SEEK_CUR else self._size_bytes()
        self.position = offset
        return offset

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        start, end = self.position, self.position + len(view)
        if len(view) <= RANGE_BYTES:
            offset = start - self._block_start
            if not 0 <= offset <= offset + len(view) <= len(self._block):
                self._block, self._block_start, offset = self._range(start, start + RANGE_BYTES), start, 0
            content = memoryview(self._block)[offset : offset + len(view)]
            view[: len(content)] = content
            self.position += len(content)
            return len(content)
        starts = range(start, end, RANGE_BYTES)
        with ThreadPoolExecutor(RANGES_AT_ONCE) as pool:
            for at, part in zip(starts, pool.map(self._range, starts, [*starts[1:], end]), strict=True):
                view[at - start : at - start + len(part)] = part
                self.position += len(part)
        return self.position - start

    def _range(self, start: int, end: int) -> bytes:
        """The bytes from ``start`` to ``end``, or to the object's end; OSError, to be retried, if not all arrive."""
        content = self.store.read_range(self.name, start, end)
        if len(content) != end - start and len(content) != self._size_bytes() - start:
            raise OSError(
                errno.EIO, f"{len(content)} of {end - start} bytes have arrived", self.store.url_of(self.name)
            )
        return content


class ObjectCheckpoint(StoredCheckpoint):
    """The checkpoint whose objects are in ``folder``."""

    parallel_reads = FILES_AT_ONCE

    def __init__(self, store: ObjectStore, folder: str) -> None:
        super().__init__(store.url_of(folder))
        self.store, self.prefix = store, f"{folder}/" if folder else ""

    def size_bytes(self, name: str) -> int:
        return self.store.size_bytes(f"{self.prefix}{name}")

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, ObjectFile(self.store, f"{self.prefix}{name}"))

    def read(self, name: str) -> bytes:
        return self.store.read(f"{self.prefix}{name}")


class ObjectNewCheckpoint(NewCheckpoint):
    """A checkpoint that is being written to ``folder``. Each file is one object, and in memory until it is closed."""

    parallel_files = FILES_AT_ONCE

    def __init__(self, storage: "ObjectStorage", step: int, folder: str) -> None:
        super().__init__(storage.store.url_of(folder))
        self.storage, self.step, self.folder = storage, step, folder
        self._require_lease: Callable[[], None] | None = None  # once the manifest may exist

    @property
    def problem(self) -> str:
        return self.storage.store.problem

    def create(self, name: str) -> BinaryIO:
        return NewFile(partial(self._store, name))

    def _store(self, name: str, content: bytes) -> None:
        with _failed_save():
            self.storage.store.write(f"{self.folder}/{name}", content)

    def commit(
        self,
        manifest: bytes,
        sizes: Mapping[str, int],
        before_commit: Callable[[], bool],
        require_lease: Callable[[], None],
    ) -> str:
        with _failed_save():
            stored = self.storage.store.files(self.folder)
            for name, size in sizes.items():
                if stored.get(name) != size:
                    raise DamagedError(f"{self.location}/{name} has {stored.get(name)} bytes, not {size}")
            replaced = self.storage.folder_of(self.step) if before_commit() else None
            self._require_lease = require_lease
            self.storage.store.create(f"{self.folder}/{MANIFEST}", manifest)
            if not self.storage.store.is_whole(f"{self.folder}/{MANIFEST}", manifest):
                raise DamagedError(f"{self.location}/{MANIFEST}: the store has kept only a part of it")
            require_lease()  # otherwise the checkpoint may not count
            return self.storage.mark(replaced, "superseded", require_lease) if replaced else ""

    def discard(self) -> None:
        if self._require_lease is not None:
            # The manifest may still be created, by a request whose answer is missing. If a newer start has acquired the
            # lease, the checkpoint is left to it, which may count it: then ``mark`` raises SupersededError.
            self.storage.mark(self.folder, "deleted", self._require_lease)
        self.storage.store.delete_folder(self.folder)


@contextmanager
def _failed_save() -> Iterator[None]:
    """Missing rights are an error of the save, not of the config: credentials may be renewed before the next save."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


@dataclass
class _Record:
    """The content of a lease object."""

    lease: WriterLease = field(default_factory=WriterLease)
    complete: list[str] = field(default_factory=list)
    """Folders of the complete checkpoints of generations before ``since``."""
    aside: dict[str, str] = field(default_factory=dict)
    """Why folders do not count any more, by markers of generations before ``since``."""
    since: int = 0
    """Changes of this and later generations count."""


@dataclass
class _State:
    """What the newest lease and the listing say."""

    record: _Record
    complete: dict[int, str]
    """Folder of the checkpoint of each step."""
    aside: dict[str, str]
    """Folders that were set aside or deleted, and why."""
    left_over: list[str]
    """Folders, markers and other objects that nobody needs."""


class ObjectStorage(CheckpointStorage):
    """Checkpoints below a URL such as s3://bucket/run/checkpoint."""

    keeps_notes = True

    def __init__(self, location: str) -> None:
        super().__init__(location.rstrip("/"))
        self.store = ObjectStore(self.location, "checkpoint.folder")
        self._saves = 0
        self._own: _Record | None = None  # of the lease that this process holds
        self._read: tuple[str, _Record] | None = None  # the newest lease object, and its record
        self._committed: set[str] = set()  # folders with a manifest

    def check_access(self) -> None:
        self.store.check_access()

    # The state

    def _lease_names(self) -> list[str]:
        """Names of the lease objects, newest last."""
        return sorted(filter(LEASE_FILE.fullmatch, self.store.names("lease")))

    def _newest_record(self) -> _Record:
        for _ in range(MIN_ATTEMPTS):
            names = self._lease_names()
            if not names:
                return _Record()
            if self._read is None or self._read[0] != names[-1]:
                try:
                    content = json_object(self.store.read(f"lease/{names[-1]}")) or {}
                    record = _Record(**{**content, "lease": WriterLease(**content["lease"])})
                except MISSING:  # a newer start has removed it
                    continue
                except (ValueError, TypeError, LookupError) as error:
                    raise CheckpointError(
                        f"{self.location}/lease/{names[-1]} is not a writer lease: remove it"
                    ) from error
                if record.since < record.lease.generation:
                    return record  # its start has not stored it for the last time
                self._read = names[-1], record
            return self._read[1]
        raise StorageError(f"{self.location}/lease: the newest object is listed, but missing. Start again later")

    def _state(self) -> _State:
        record = self._newest_record()
        entries = self.store.names()
        generation = record.lease.generation

        def counts(by: int) -> bool:
            return not generation or record.since <= by <= generation

        aside, left_over = dict(record.aside), [name for name in entries if ACCESS_FILE.fullmatch(name)]
        for match in filter(None, map(MARKER.fullmatch, entries)):
            if not counts(int(match[4])):
                left_over.append(match[0])
            elif aside.get(match[1]) != "deleted":
                aside[match[1]] = match[3]
        aside = {folder: why for folder, why in aside.items() if folder in entries}

        adopted = {*record.complete, *self._committed}
        checkpoints: list[tuple[int, int, int, str]] = []  # step, generation and number of the save, folder
        for match in filter(None, map(PREFIX.fullmatch, entries)):
            folder, by = match[0], int(match[2] or 0)
            if not entries[folder]:
                continue
            if folder not in aside and (not by or folder in record.complete or counts(by)):
                checkpoints.append((int(match[1]), by, int(match[4] or 0), folder))
            elif aside.get(folder, "deleted") == "deleted":
                left_over.append(folder)
        # Those of the record are complete, and so is what once was: a marker comes before a deletion.
        unknown = [(by, folder) for _, by, _, folder in checkpoints if not by or folder not in adopted]
        with ThreadPoolExecutor(REQUESTS) as pool:
            found = pool.map(
                lambda folder: self.store.exists(f"{folder}/{MANIFEST}"), [folder for _, folder in unknown]
            )
            absent = {folder: by for (by, folder), has_manifest in zip(unknown, found, strict=True) if not has_manifest}
        # Without a generation, somebody may be copying it.
        left_over += [folder for folder, by in absent.items() if by]
        complete: dict[int, str] = {}
        for step, by, _, folder in sorted(checkpoints):
            if folder in absent:
                continue
            if by:
                self._committed.add(folder)
            # The newest save of a step counts; a process was killed before it could mark the others. A folder without a
            # generation is nobody's left-over: it counts if the run has not saved that step.
            if step in complete and _generation(complete[step]):
                left_over.append(complete[step])
            complete[step] = folder
        return _State(record, complete, aside, left_over)

    def folder_of(self, step: int) -> str | None:
        return self._state().complete.get(step)

    def steps(self) -> list[int]:
        return list(self._state().complete)

    def names(self) -> list[str]:
        state = self._state()
        aside = [f"{folder}.{why}" for folder, why in state.aside.items() if why != "deleted"]
        return sorted([*state.complete.values(), *aside])

    def versions(self) -> dict[int, Hashable]:
        return dict(self._state().complete)

    def open(self, step: int) -> ObjectCheckpoint:
        return ObjectCheckpoint(self.store, self.folder_of(step) or f"step-{step}")

    # Changes

    def itself(self) -> ObjectCheckpoint | None:
        return ObjectCheckpoint(self.store, "") if self.store.exists(MANIFEST) else None

    def store_export(self, folder: Path, origin: bytes) -> str:
        self.store.delete(EXPORT_ORIGIN)  # first, so that an interrupted export is repeated
        self.store.delete_folder(EXPORT)
        self.store.upload(folder, EXPORT, last=())
        self.store.write(EXPORT_ORIGIN, origin)
        return self.store.url_of(EXPORT)

    def read_export_origin(self) -> bytes:
        try:
            return self.store.read(EXPORT_ORIGIN)
        except MISSING:
            return b""

    def output_copies(
        self, folder: Path, names: Callable[[], Iterable[str]], write: Callable[[int], None]
    ) -> BucketCopies:
        return BucketCopies(self, folder, names, write)

    def store_output(self, name: str, file: Path) -> None:
        with tempfile.NamedTemporaryFile() as copy:  # of one moment: the size of an upload is checked
            with file.open("rb") as content:
                shutil.copyfileobj(content, copy)
            copy.flush()
            self.store.upload_file(Path(copy.name), f"{OUTPUTS}/{name}")

    def write_note(self, name: str, content: bytes) -> None:
        self.store.write(f"{NOTES}/{name}", content)

    def read_notes(self) -> dict[str, bytes]:
        found = {}
        for name in self.store.names(NOTES):
            with suppress(*MISSING):  # deleted meanwhile
                found[name] = self.store.read(f"{NOTES}/{name}")
        return found

    def delete_note(self, name: str) -> None:
        self.store.delete(f"{NOTES}/{name}")

    def new_checkpoint(self, step: int, lease: WriterLease) -> ObjectNewCheckpoint:
        self._saves += 1
        return ObjectNewCheckpoint(self, step, f"step-{step}.{lease.generation}-{lease.id[:8]}.{self._saves}")

    def mark(self, folder: str, why: str, require_lease: Callable[[], None]) -> str:
        """Create a marker. It has an effect only if this start holds the lease at the second ``require_lease``."""
        require_lease()
        assert self._own is not None, "only the holder of the lease changes checkpoints"
        with suppress(FileExistsError):
            self.store.create(f"{folder}.{why}.{self._own.lease.generation}", why.encode())
        require_lease()
        return f"{folder}.{why}"

    def set_aside(self, step: int, why: str, require_lease: Callable[[], None]) -> str:
        folder = self.folder_of(step)
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", f"{self.location}/step-{step}")
        return self.mark(folder, why, require_lease)

    def delete(self, step: int, require_lease: Callable[[], None]) -> None:
        folder = self.folder_of(step)
        if folder is not None:
            self.mark(folder, "deleted", require_lease)
            self._delete(folder)

    def _delete(self, folder: str) -> None:
        """Delete the objects of a checkpoint that does not count any more, and then its markers."""
        self._committed.discard(folder)
        self.store.delete_folder(folder)
        for name in self.store.names():
            match = MARKER.fullmatch(name)
            if match and match[1] == folder:
                self.store.delete(name)

    # The writer lease

    def read_lease(self) -> WriterLease:
        return self._newest_record().lease

    def write_lease(self, lease: WriterLease) -> None:
        renewed = self._own is not None and self._own.lease == lease
        if not renewed:
            state = self._state()
            self._own = _Record(lease, sorted(state.complete.values()), state.aside, state.record.since)
        assert self._own is not None
        name, content = _lease_file(lease.generation), _encoded(self._own)
        try:
            self.store.create(name, content)
        except FileExistsError:
            raise superseded(self.read_lease(), lease, self.location) from None
        except MISSING as error:
            raise CheckpointError(f"{self.location} cannot be written: {error}") from error
        if not self.store.is_whole(name, content):
            self._replace_lease(name, content)
        now = self.read_lease()
        if now.id != lease.id:  # this start was so slow that leases of this number have come and gone
            self.store.delete(name)
            raise superseded(now, lease, self.location)
        if not renewed:
            self._rewrite_lease()

    def _rewrite_lease(self) -> None:
        """Store the current state in the lease of this process. Later changes of older starts do not count."""
        assert self._own is not None
        lease, state = self._own.lease, self._state()
        if state.record.lease.id != lease.id:
            raise superseded(state.record.lease, lease, self.location)
        own = {folder for folder in state.complete.values() if _generation(folder) == lease.generation}
        complete = sorted(set(state.complete.values()) - own)
        self._own, self._read = _Record(lease, complete, state.aside, lease.generation), None
        self._replace_lease(_lease_file(lease.generation), _encoded(self._own))

    def _replace_lease(self, name: str, content: bytes) -> None:
        for _ in range(MIN_ATTEMPTS):
            self.store.write(name, content)
            if self.store.is_whole(name, content):
                return
        raise StorageError(f"{self.store.url_of(name)}: the store has kept only a part of it. Start again later")

    def check_lease(self, lease: WriterLease) -> None:
        names = self._lease_names()
        if not names:
            super().check_lease(lease)
        elif int(names[-1].partition(".")[0]) != lease.generation:
            raise superseded(self.read_lease(), lease, self.location)

    def remove_left_overs(self, require_lease: Callable[[], None]) -> None:
        require_lease()
        state = self._state()
        for name in self._lease_names():
            if name < _lease_file(state.record.lease.generation).rpartition("/")[2]:
                self.store.delete(f"lease/{name}")
        for name in state.left_over:
            require_lease()
            if PREFIX.fullmatch(name):
                logger.info(f"{self.location}/{name}, which an earlier start has left, is removed")
                self._delete(name)
            else:
                self.store.delete(name)
        if "deleted" in state.aside.values():  # a folder of the same name may be copied there again
            self._rewrite_lease()
        self._abort_uploads(require_lease)

    def _abort_uploads(self, require_lease: Callable[[], None]) -> None:
        """Abort unfinished multipart uploads of killed starts to S3. Other stores remove theirs by themselves."""
        try:
            uploads = self.store.uploads()
        except ConfigError as error:
            logger.warning(f"unfinished uploads of killed starts cannot be removed: {error}")
            return
        for upload in uploads:
            folder = upload["Key"].removeprefix(self.store.key("")).partition("/")[0]
            by = _generation(folder)
            if folder in (EXPORT, OUTPUTS) or (by and (self._own is None or by < self._own.lease.generation)):
                require_lease()
                self.store.abort_upload(upload)


def _lease_file(generation: int) -> str:
    return f"lease/{generation:08}.json"


def _encoded(record: _Record) -> bytes:
    return json.dumps(asdict(record)).encode()


def _generation(folder: str) -> int:
    """The generation whose start has saved ``folder``; 0 if it is the folder of no start."""
    match = PREFIX.fullmatch(folder)
    return int(match[2] or 0) if match else 0
