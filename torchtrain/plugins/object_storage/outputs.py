"""Metrics of a run in its checkpoints: in a bucket, they outlive the disk of the node that wrote them.

They are a compressed tar archive, which is stored in parts ``outputs.tar.gz``, ``outputs.tar.gz.1`` and so on, so that
one part at a time is in memory. For readers of a run that is training, copies of the files themselves are stored beside
the checkpoints after each save (``BucketCopies``).
"""

import gzip
import io
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Protocol, cast

from torchtrain.checkpoint.format import read_manifest, read_verified
from torchtrain.checkpoint.storage import OutputCopies, StoredCheckpoint
from torchtrain.errors import DamagedError
from torchtrain.files import atomic_write, json_object, printable
from torchtrain.logging import BestEffort, logger

OUTPUTS = "outputs.tar.gz"
PART_BYTES = 16 * 2**20  # of the archive
MAX_RATIO = 64  # of the archive's unpacked size to its size; that of metrics is below 10, and gzip reaches 1000
MAX_FILES = 10_000  # in the archive; each start of a run writes one
METRICS = "metrics.jsonl"
TRACKER_RUNS = ("wandb_id", "trackio_run")
"""Files with the id or name of the run in a tracker."""
PACKED = (METRICS, "tensorboard", *TRACKER_RUNS)
"""Files and folders in the dump folder."""
COPIED = ("config.toml", METRICS, "tensorboard")
"""Those of which copies are stored."""


def output_files(dump_folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Path in ``dump_folder``, and path, of the files that ``names`` are, or that are in the folders of these names."""
    for name in names:
        path = dump_folder / name
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file() and not file.is_symlink():
                yield file.relative_to(dump_folder).as_posix(), file


def pack_outputs(dump_folder: Path, create: Callable[[str], AbstractContextManager[Any]]) -> None:
    """Store the metrics in ``dump_folder``.

    Args:
        create: returns a context manager that yields a new binary file of a name.
    """
    parts = _PartsWriter(create)
    with (
        gzip.GzipFile(fileobj=cast(IO[bytes], parts), mode="wb", compresslevel=1) as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as tar,
    ):
        for name, file in output_files(dump_folder, PACKED):
            entry = tarfile.TarInfo(name)
            with file.open("rb") as content:
                entry.size = file.stat().st_size  # which is added, although the file may grow meanwhile
                tar.addfile(entry, content)
    parts.end()


class OutputStorage(Protocol):
    def store_output(self, name: str, file: Path) -> None:
        """Store a copy of ``file`` in place of an earlier one, under its path ``name`` in the dump folder.

        The file may grow meanwhile. Called in a background thread.
        """


class BucketCopies(OutputCopies):
    """Outputs in the dump folder: in each checkpoint, and copies beside the checkpoints in ``storage``.

    A failure is logged once, and training continues. The arguments: see ``CheckpointStorage.output_copies``.
    """

    def __init__(
        self,
        storage: OutputStorage,
        dump_folder: Path,
        names: Callable[[], Iterable[str]],
        write: Callable[[int], None],
    ) -> None:
        self.storage, self.dump_folder = storage, dump_folder
        self._names, self._write = names, write
        self._stored: dict[str, tuple[int, int]] = {}  # size and time of change, by name
        self._writing = BestEffort("the outputs that are copied after a save")
        self._storing = BestEffort(f"the copies of metrics and reports beside the checkpoints in {storage}")
        self._lock = threading.Lock()

    def add_to_checkpoint(self, create: Callable[[str], AbstractContextManager[Any]]) -> None:
        pack_outputs(self.dump_folder, create)

    def restore(self, checkpoint: StoredCheckpoint) -> None:
        restore_outputs(checkpoint, self.dump_folder)

    def update(self, step: int) -> None:
        # While an update after an earlier save is still at work, this does nothing: the next one stores the changes.
        if self._lock.acquire(blocking=False):
            try:
                with self._writing:
                    self._write(step)
                with self._storing:
                    self._store()
            finally:
                self._lock.release()

    def store(self) -> None:
        with self._lock, self._storing:
            self._store()

    def _store(self) -> None:
        for name, file in output_files(self.dump_folder, (*COPIED, *self._names())):
            stat = file.stat()
            version = stat.st_size, stat.st_mtime_ns
            if self._stored.get(name) != version:
                self.storage.store_output(name, file)
                self._stored[name] = version


class _PartsWriter:
    """A file that is stored in parts of about ``PART_BYTES``."""

    def __init__(self, create: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._create = create
        self._number = 0
        self._part = bytearray()

    def write(self, content: Any) -> int:
        self._part += content
        if len(self._part) >= PART_BYTES:
            self.end()
        return len(content)

    def flush(self) -> None:
        pass

    def end(self) -> None:
        """Store what has been written since the last part."""
        if self._part:
            with self._create(_part_name(self._number)) as file:
                file.write(self._part)
            self._number += 1
            self._part = bytearray()


def _part_name(number: int) -> str:
    return f"{OUTPUTS}.{number}" if number else OUTPUTS


class _PartsReader(io.RawIOBase):
    """The parts of an archive, which are verified, as one file."""

    def __init__(self, checkpoint: StoredCheckpoint, names: set[str]) -> None:
        self._checkpoint, self._names = checkpoint, names
        self._number = 0
        self._part = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        name = _part_name(self._number)
        if not self._part and name in self._names:
            self._part = memoryview(read_verified(self._checkpoint, name))
            self._number += 1
        count = min(len(target), len(self._part))
        target[:count], self._part = self._part[:count], self._part[count:]
        return count


class _BoundedReader:
    """The unpacked archive, which ends with a DamagedError where it has more than ``most_bytes``."""

    def __init__(self, unpacked: gzip.GzipFile, most_bytes: int, archive: str) -> None:
        self._unpacked, self._left, self._archive = unpacked, most_bytes, archive

    def read(self, size: int) -> bytes:
        content = self._unpacked.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise DamagedError(f"{self._archive} is damaged: unpacked, it is more than {MAX_RATIO} times as large")
        return content


def _read_outputs(checkpoint: StoredCheckpoint) -> Iterator[tuple[str, bytes]]:
    """Path in the dump folder and content of each file of metrics in ``checkpoint``, in the order of ``PACKED``.

    Raises:
        DamagedError: the archive is damaged, or unpacks to much more than metrics do.
    """
    sizes = {record.name: record.size_bytes for record in read_manifest(checkpoint).files}
    if OUTPUTS not in sizes:
        return
    path = checkpoint.path_of(OUTPUTS)
    most_bytes = 2**20 + MAX_RATIO * sum(size for name, size in sizes.items() if name.startswith(OUTPUTS))
    packed: Any = io.BufferedReader(_PartsReader(checkpoint, set(sizes)))
    try:
        with gzip.GzipFile(fileobj=packed) as unpacked:
            bounded: Any = _BoundedReader(unpacked, most_bytes, path)
            with tarfile.open(fileobj=bounded, mode="r|") as tar:
                for number, entry in enumerate(tar, 1):
                    if number > MAX_FILES:
                        raise DamagedError(f"{path} is damaged: it has more than {MAX_FILES:,} files")
                    # A sparse file may have any size, which the archive does not contain.
                    content = tar.extractfile(entry) if entry.isreg() and not entry.issparse() else None
                    # Whoever can write to the bucket could name a file anywhere on this machine.
                    folder, *names = parts = entry.name.split("/")
                    is_packed = folder in PACKED and len(names) <= 1 and not {"", ".", ".."} & set(parts)
                    if content is not None and is_packed:
                        yield entry.name, content.read()
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError) as error:
        raise DamagedError(f"{path} is damaged: {printable(str(error))}") from error


def read_metrics(checkpoint: StoredCheckpoint) -> bytes:
    """The content of metrics.jsonl in ``checkpoint``; empty if it has none. Raises DamagedError."""
    return next((content for name, content in _read_outputs(checkpoint) if name == METRICS), b"")


def restore_outputs(checkpoint: StoredCheckpoint, dump_folder: Path) -> None:
    """Add the metrics in ``checkpoint`` to those in ``dump_folder``, which may be of other starts of the same run.

    They are, if the run was continued on another machine in between. Files that only one of both has are kept, and of
    two of the same name the larger one, except for metrics.jsonl (``merge_metrics``), and for the run in a tracker,
    which is that of the checkpoint if that has lines that the folder lacks.
    """
    restored = has_new_lines = False
    for name, content in _read_outputs(checkpoint):
        file = dump_folder / name
        own = file.read_bytes() if file.exists() else b""
        if name == METRICS:
            content = merge_metrics(own, content)
            has_new_lines = content != own
        elif name not in TRACKER_RUNS:
            content = max(own, content, key=len)
        elif own and not has_new_lines:
            continue
        if content != own or not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as written:
                written.write(content)
            restored = True
    if restored:
        logger.info(f"{dump_folder} lacked metrics of other starts of the run: added those in {checkpoint}")


def merge_metrics(own: bytes, other: bytes) -> bytes:
    """The lines of two metrics.jsonl of one run, in the order in which they were written.

    Each process begins with an event "start", which has the generation of its writer lease. Where both have the lines
    of a process, those of one continue those of the other.
    """
    for shorter, longer in ((own, other), (other, own)):
        if longer.startswith(shorter):
            return longer
    processes: dict[bytes, list[bytes]] = {}
    for content in (own, other):
        for start, lines in _by_process(content):
            processes[start] = max(processes.get(start, []), lines, key=len)
    return b"".join(line for start in sorted(processes, key=_order) for line in processes[start])


def _by_process(content: bytes) -> Iterator[tuple[bytes, list[bytes]]]:
    """The event "start" of each process, and the lines of the process, from this one on."""
    start, lines = b"", list[bytes]()
    for line in content.removesuffix(b"\n").split(b"\n"):
        if b'"event": "start"' in line:
            yield start, lines
            start, lines = line, []
        lines.append(line + b"\n")
    yield start, lines


def _order(start: bytes) -> tuple[int, float]:
    event = json_object(start) or {}
    try:
        return int(event["generation"]), float(event["time"])
    except (ValueError, TypeError, LookupError):  # what comes before the first start, or a damaged line
        return -1, 0.0
