"""Cache on a local disk of the ranges that are read from object stores, shared by the processes of a node.

Each entry is a file: the content of a range and its XXH3-128. Entries that were not used for the longest time are
removed. The cache is an optimization only: an entry that is damaged, or cannot be read or written, is read from the
store.
"""

import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from torchtrain.files import atomic_write, open_lock_file, require_folder
from torchtrain.logging import logger

_HASH_BYTES = 16
_DISK_BLOCK_BYTES = 4096  # a file takes a multiple of it


def read_cached(
    cache: "RangeCache | None", url: str, tag: str, start: int, end: int, fetch: Callable[[], bytes]
) -> bytes:
    """The bytes of an object from one offset to another: those in the cache, or ``fetch()``.

    Args:
        cache: None: there is no cache.
        url: the URL of the object.
        tag: identifies its version; objects without one are not cached.
        start, end: the range.
        fetch: reads the range.
    """
    return cache.read(f"{url}\0{tag}\0{start}\0{end}", fetch) if cache is not None and tag else fetch()


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
        require_folder(self._folder, f"job.data_cache_folder = {str(folder)!r}")
        self._limit_bytes = limit_bytes
        # All processes of the node together write this much before one of them removes old entries.
        self._unchecked_limit_bytes = limit_bytes / 8 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._unchecked_bytes = self._unchecked_limit_bytes  # earlier processes may have had a higher limit
        self._lock = threading.Lock()
        self._is_writable = True

    def read(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """The content of the entry ``key``, or ``fetch()``, which is then stored.

        Args:
            key: identifies the object, its version and the range.
            fetch: reads the range.
        """
        name = xxhash.xxh3_128_hexdigest(key.encode())
        path = self._folder / name[:2] / name[2:]
        with suppress(OSError):
            entry = path.read_bytes()
            content, digest = entry[:-_HASH_BYTES], entry[-_HASH_BYTES:]
            if xxhash.xxh3_128_digest(content) == digest:
                os.utime(path)  # its last use
                return content
        content = fetch()
        if self._is_writable and self._reserve(len(content)):
            try:
                path.parent.mkdir(exist_ok=True)
                with atomic_write(path) as file:
                    file.write(content)
                    file.write(xxhash.xxh3_128_digest(content))
            except OSError as error:
                self._is_writable = False
                logger.warning("%s cannot be written, and is only read from now on: %s", self._folder, error)
        return content

    def _reserve(self, size: int) -> bool:
        """Whether an entry of ``size`` bytes may be written; removes old entries first if necessary."""
        size = _size_on_disk(size + _HASH_BYTES)
        with self._lock:
            if size > self._unchecked_limit_bytes:
                return False
            if self._unchecked_bytes + size > self._unchecked_limit_bytes:
                try:
                    self._remove_old()
                except BlockingIOError:  # another process removes old entries
                    return False
                except OSError as error:
                    self._is_writable = False
                    logger.warning("%s cannot be listed, and is only read from now on: %s", self._folder, error)
                    return False
                self._unchecked_bytes = 0
            self._unchecked_bytes += size
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
                        entries.append((stat.st_mtime_ns, entry.path, _size_on_disk(stat.st_size)))
            excess = sum(size for _, _, size in entries) - self._limit_bytes * 7 / 8
            for _, path, size in sorted(entries):
                if excess <= 0:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                excess -= size


def _size_on_disk(size: int) -> int:
    return -(-size // _DISK_BLOCK_BYTES) * _DISK_BLOCK_BYTES
