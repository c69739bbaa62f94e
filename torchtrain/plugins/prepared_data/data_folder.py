"""Folders of tokenized data: list, read ranges, write files atomically. Those by URL are in remote_folder.py."""

import contextlib
import errno
import fcntl
import functools
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torchtrain.datasets.text_sources import read_with_retries
from torchtrain.errors import DataError
from torchtrain.files import (
    MISSING,
    atomic_write,
    hash_of,
    open_lock_file,
    partial_path,
    read_file,
    with_retries,
)

Range = tuple[str, int, int]
"""Name of a file, offset, and number of bytes."""

_OPEN_FILES = 256  # maximum number of open files of a folder


class DataFolder(ABC):
    """A folder of files that are written once."""

    location: str
    """Path or URL."""
    reads_ahead = False
    """Whether ``read_ahead`` has an effect."""

    @abstractmethod
    def inner(self, name: str) -> "DataFolder":
        """The folder ``name`` in this one."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Size in bytes of each file, by name; empty if the folder does not exist."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a file; FileNotFoundError if it does not exist."""

    @abstractmethod
    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """Read exactly the given ranges.

        Raises:
            StorageError: the file system or the network fails for minutes.
            DataError: a file is shorter than when it was opened, or missing.
        """

    def read_ahead(self, ranges: Iterable[Range]) -> None:  # noqa: B027
        """Start reading ranges that ``read_ranges`` will be called for."""

    @abstractmethod
    def hash_of(self, name: str) -> str:
        """XXH3-128 of a file, in hex; FileNotFoundError if it does not exist."""

    @abstractmethod
    def write(self, name: str, *, flush: bool = False) -> AbstractContextManager[Any]:
        """Context manager that yields a binary file, which gets its name when the body ends without an error."""

    @abstractmethod
    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists, atomically; returns whether it was written."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""


class LocalFolder(DataFolder):
    """A folder of a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.location = str(path)
        self._file = functools.lru_cache(_OPEN_FILES)(lambda name: _File(self.path / name))

    def inner(self, name: str) -> "LocalFolder":
        return LocalFolder(self.path / name)

    def sizes(self) -> dict[str, int]:
        def scan() -> dict[str, int]:
            with os.scandir(self.path) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

        try:
            return with_retries(scan, self.path)
        except MISSING:
            return {}

    def read(self, name: str) -> bytes:
        return read_file(self.path / name, DataError)

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        # All ranges are requested before the first is read, and nothing else is: a memory map would read ahead, from a
        # cold disk hundreds of times as much as is used.
        if hasattr(os, "posix_fadvise"):
            for name, start, size in ranges:
                with contextlib.suppress(OSError):  # the read below raises it, too
                    os.posix_fadvise(self._file(name).descriptor, start, size, os.POSIX_FADV_WILLNEED)
        return [read_with_retries(functools.partial(self._pread, *one), self.path / one[0]) for one in ranges]

    def _pread(self, name: str, start: int, size: int) -> bytes:
        content = b""
        while len(content) < size:
            try:
                block = os.pread(self._file(name).descriptor, size - len(content), start + len(content))
            except OSError:
                self._file.cache_clear()  # so that the next attempt opens it again
                raise
            if not block:
                raise DataError(f"{self.path / name} is shorter than when the run began: restore it")
            content += block
        return content

    def hash_of(self, name: str) -> str:
        return with_retries(functools.partial(hash_of, self.path / name), self.path / name)

    def write(self, name: str, *, flush: bool = False) -> AbstractContextManager[Any]:
        return atomic_write(self.path / name, flush=flush)

    def create(self, name: str, content: bytes) -> bool:
        target = self.path / name
        if target.exists():
            return False
        temporary = partial_path(target)
        try:
            temporary.write_bytes(content)
            try:
                os.link(temporary, target)  # fails if the target exists, unlike a rename
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                # A file system without hard links: the rename would replace a file of another process.
                with os.fdopen(open_lock_file(self.path / ".create.lock"), "r+") as lock:
                    fcntl.lockf(lock, fcntl.LOCK_EX)
                    if target.exists():
                        return False
                    temporary.rename(target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)


class _File:
    """An open file, which is closed with its last reference."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
