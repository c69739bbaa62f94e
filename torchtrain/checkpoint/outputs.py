"""Metrics of a run in its checkpoints: in a bucket, they outlive the disk of the node that wrote them.

They are a compressed tar archive, which is stored in parts ``outputs.tar.gz``, ``outputs.tar.gz.1`` and so on, so that
one part at a time is in memory.
"""

import gzip
import io
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import IO, Any, cast

from torchtrain.checkpoint.format import read_manifest, read_verified
from torchtrain.checkpoint.storage import StoredCheckpoint
from torchtrain.files import atomic_write
from torchtrain.logging import logger

OUTPUTS = "outputs.tar.gz"
PART_BYTES = 16 * 2**20  # of the archive
METRICS = "metrics.jsonl"
PACKED = (METRICS, "tensorboard", "wandb_id")
"""Files and folders in the dump folder."""


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
        for name in PACKED:
            path = dump_folder / name
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            for file in files:
                if file.is_file() and not file.is_symlink():
                    entry = tarfile.TarInfo(file.relative_to(dump_folder).as_posix())
                    with file.open("rb") as content:
                        entry.size = file.stat().st_size  # which is added, although the file may grow meanwhile
                        tar.addfile(entry, content)
    parts.end()


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


def _read_outputs(checkpoint: StoredCheckpoint) -> Iterator[tuple[str, IO[bytes]]]:
    """Path in the dump folder and content of each file of metrics in ``checkpoint``, in the order of ``PACKED``.

    A content can be read until the next one is requested.

    Raises:
        DamagedError: the archive is damaged.
    """
    names = {record.name for record in read_manifest(checkpoint).files}
    if OUTPUTS not in names:
        return
    with tarfile.open(fileobj=io.BufferedReader(_PartsReader(checkpoint, names)), mode="r|gz") as tar:
        for entry in tar:
            content = tar.extractfile(entry) if entry.isreg() else None
            parts = entry.name.split("/")
            # Whoever can write to the bucket could name a file anywhere on this machine.
            if content is not None and parts[0] in PACKED and len(parts) <= 2 and not {"", ".", ".."} & set(parts):
                yield entry.name, content


def read_metrics(checkpoint: StoredCheckpoint) -> bytes:
    """The content of metrics.jsonl in ``checkpoint``; empty if it has none. Raises DamagedError."""
    return next((content.read() for name, content in _read_outputs(checkpoint) if name == METRICS), b"")


def restore_outputs(checkpoint: StoredCheckpoint, dump_folder: Path) -> None:
    """Write the metrics in ``checkpoint`` to ``dump_folder``, unless it has metrics already."""
    if (dump_folder / METRICS).exists():
        return
    with ExitStack() as at_the_end:
        for name, content in _read_outputs(checkpoint):
            file = dump_folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as now:
                # It marks all as restored, so it gets its name last.
                written = (at_the_end if name == METRICS else now).enter_context(atomic_write(file))
                shutil.copyfileobj(content, written)
    if (dump_folder / METRICS).exists():
        logger.info(f"{dump_folder} has no metrics: restored those in {checkpoint}")
