"""Cache on a local disk of the ranges that are read from object stores, shared by the processes of a node.

An entry is a file: either the content of a range and its XXH3-128, or a segment of an object that is read in small
ranges. A segment is a sparse file, which keeps the number of files small: each block of the object has a fixed place in
it, together with its hash. Blocks that are absent are holes. Entries that were not used for the longest time are
removed. The cache is an optimization only: what is damaged, or cannot be read or written, is read from the store.
"""

import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import xxhash

from torchtrain.config.schema import section_of
from torchtrain.datasets.data_source import SourceContext
from torchtrain.files import atomic_write, open_lock_file, require_folder
from torchtrain.logging import logger
from torchtrain.plugins.remote_data.options import RemoteDataConfig

_HASH_BYTES = 16
_DISK_BLOCK_BYTES = 4096  # a file takes a multiple of it

# A block of a segment: content, and its XXH3-64. A range is extended to whole blocks, so they are small.
_BLOCK_CONTENT_BYTES = 1016
_BLOCK_BYTES = _BLOCK_CONTENT_BYTES + 8
_SEGMENT_BLOCKS = 2**16  # 64 MiB


def cache_of(context: SourceContext) -> "RangeCache | None":
    """The cache that ``context`` asks for. Raises as ``RangeCache`` does."""
    options = section_of(context, RemoteDataConfig)
    return RangeCache(options.cache_folder, options.cache_gib * 2**30) if options.cache_folder else None


class RangeCache:
    """A folder of cached ranges.

    Args:
        folder: a local folder, which is created if it is missing.
        limit_bytes: maximum size of all entries.

    Raises:
        ConfigError: ``folder`` cannot be written.
    """

    def __init__(self, folder: str | Path, limit_bytes: float) -> None:
        self._folder = Path(folder) / "torchtrain-ranges"  # the folder of the user may contain other files
        require_folder(self._folder, f"remote_data.cache_folder = {str(folder)!r}")
        self._limit_bytes = limit_bytes
        # All processes of the node together write this much before one of them removes old entries.
        self._unchecked_limit_bytes = limit_bytes / 8 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._unchecked_bytes = self._unchecked_limit_bytes  # earlier processes may have had a higher limit
        self._lock = threading.Lock()
        self._is_writable = True
        self._warnings: set[str] = set()

    def read(self, key: str, fetch: Callable[[], bytes], is_same: Callable[[], bool] = lambda: True) -> bytes:
        """The content of the entry ``key``, or ``fetch()``, which is then stored.

        Args:
            key: identifies the object, its version and the range.
            fetch: reads the range.
            is_same: whether the object still has that version; called after ``fetch``. If not, nothing is stored.
        """
        path = self._path(key)
        with suppress(OSError):
            entry = path.read_bytes()
            content, digest = entry[:-_HASH_BYTES], entry[-_HASH_BYTES:]
            if xxhash.xxh3_128_digest(content) == digest:
                with suppress(OSError):  # of another user, or on a read-only disk
                    os.utime(path)  # its last use
                return content
        content = fetch()

        def write() -> None:
            with atomic_write(path) as file:
                file.write(content)
                file.write(xxhash.xxh3_128_digest(content))

        self._store(path, len(content) + _HASH_BYTES, write, is_same)
        return content

    def read_part(
        self,
        key: str,
        start: int,
        end: int,
        size: int,
        fetch: Callable[[int, int], bytes],
        is_same: Callable[[], bool] = lambda: True,
    ) -> bytes:
        """A small range of an object, from the blocks in the cache and one ``fetch`` of those that are missing.

        Args:
            key: identifies the object and its version.
            start, end: the range.
            size: the number of bytes of the object.
            fetch: reads from one offset to another; what it returns is stored.
            is_same: as for ``read``.
        """
        first, stop = start // _BLOCK_CONTENT_BYTES, -(-end // _BLOCK_CONTENT_BYTES)
        blocks: list[bytes] = []
        for number in range(first // _SEGMENT_BLOCKS, -(-stop // _SEGMENT_BLOCKS)):
            origin = number * _SEGMENT_BLOCKS
            wanted = range(max(first, origin), min(stop, origin + _SEGMENT_BLOCKS))
            path = self._path(f"{key}\0segment {number}")
            found = _read_blocks(path, wanted.start - origin, len(wanted))
            missing = [block for block, content in zip(wanted, found, strict=True) if content is None]
            if missing:
                begin, over = missing[0], missing[-1] + 1
                content = fetch(begin * _BLOCK_CONTENT_BYTES, min(over * _BLOCK_CONTENT_BYTES, size))
                fetched = [
                    content[at : at + _BLOCK_CONTENT_BYTES] for at in range(0, len(content), _BLOCK_CONTENT_BYTES)
                ]
                found[begin - wanted.start : over - wanted.start] = fetched
                write = partial(_write_blocks, path, begin - origin, fetched)
                self._store(path, len(fetched) * _BLOCK_BYTES, write, is_same)
            blocks += (content for content in found if content is not None)
        skipped = first * _BLOCK_CONTENT_BYTES
        return b"".join(blocks)[start - skipped : end - skipped]

    def _path(self, key: str) -> Path:
        name = xxhash.xxh3_128_hexdigest(key.encode())
        return self._folder / name[:2] / name[2:]

    def _store(self, path: Path, size: int, write: Callable[[], None], is_same: Callable[[], bool]) -> None:
        """Call ``write``, which writes ``size`` bytes to ``path``, if the cache has room and the object ``is_same``."""
        if self._is_writable and self._reserve(size):
            if not is_same():
                self._warn_once(
                    "an object has another ETag than when the run began, or its store does not answer: "
                    "its ranges are not kept in %s",
                    self._folder,
                )
                return
            try:
                path.parent.mkdir(exist_ok=True)
                write()
            except OSError as error:
                self._is_writable = False
                logger.warning("%s cannot be written, and is only read from now on: %s", self._folder, error)

    def _warn_once(self, message: str, *arguments: object) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            logger.warning(message, *arguments)

    def _reserve(self, size: int) -> bool:
        """Whether ``size`` bytes may be written; removes old entries first if necessary."""
        size = _size_on_disk(size)
        if size > self._unchecked_limit_bytes:
            self._warn_once(
                "remote_data.cache_gib is too low to keep ranges of %.0f MiB, which are read from the store again: "
                "raise it to %.3g",
                size / 2**20,
                size / self._unchecked_limit_bytes * self._limit_bytes / 2**30,
            )
            return False
        with self._lock:
            if self._unchecked_bytes + size <= self._unchecked_limit_bytes:
                self._unchecked_bytes += size
                return True
        try:
            self._remove_old()  # without the lock: other threads do not wait for it
        except BlockingIOError:  # another thread or process removes old entries
            return False
        except OSError as error:
            self._is_writable = False
            logger.warning("%s cannot be listed, and is only read from now on: %s", self._folder, error)
            return False
        with self._lock:
            self._unchecked_bytes = size
        return True

    def _remove_old(self) -> None:
        """Remove entries until 7/8 of the limit are left, by the time of their last use."""
        with os.fdopen(open_lock_file(self._folder / ".lock"), "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entries = []
            for folder in self._folder.iterdir():
                for entry in os.scandir(folder) if folder.is_dir() else ():
                    with suppress(FileNotFoundError):
                        stat = entry.stat()
                        size = min(_size_on_disk(stat.st_size), stat.st_blocks * 512)  # segments have holes
                        entries.append((stat.st_mtime_ns, entry.path, size))
            excess = sum(size for _, _, size in entries) - self._limit_bytes * 7 / 8
            for _, path, size in sorted(entries):
                if excess <= 0:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                excess -= size


def _size_on_disk(size: int) -> int:
    return -(-size // _DISK_BLOCK_BYTES) * _DISK_BLOCK_BYTES


def _read_blocks(path: Path, first: int, count: int) -> list[bytes | None]:
    """So many blocks of a segment from number ``first`` on; None for those that are absent or damaged."""
    try:
        with open(path, "rb", buffering=0) as file:
            records = os.pread(file.fileno(), count * _BLOCK_BYTES, first * _BLOCK_BYTES)
            with suppress(OSError):  # of another user, or on a read-only disk
                os.utime(file.fileno())  # its last use
    except OSError:
        return [None] * count
    blocks: list[bytes | None] = []
    for start in range(0, count * _BLOCK_BYTES, _BLOCK_BYTES):
        content = records[start : start + _BLOCK_CONTENT_BYTES]
        digest = records[start + _BLOCK_CONTENT_BYTES : start + _BLOCK_BYTES]
        blocks.append(content if xxhash.xxh3_64_digest(content) == digest else None)
    return blocks


def _write_blocks(path: Path, first: int, blocks: Sequence[bytes]) -> None:
    """Write blocks of a segment from number ``first`` on.

    Other processes may read and write at the same time: blocks of the same place have the same content, and one that is
    only half written does not match its hash.
    """
    padded = (block.ljust(_BLOCK_CONTENT_BYTES, b"\0") for block in blocks)  # the last one of the object is shorter
    records = b"".join(block + xxhash.xxh3_64_digest(block) for block in padded)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "wb", buffering=0) as file:
        os.pwrite(file.fileno(), records, first * _BLOCK_BYTES)
