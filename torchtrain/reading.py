"""Reading from file systems that may fail for a while: a read is tried again before it is an error.

A file that is missing is not tried again: ``FileNotFoundError`` and its like are raised at once.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import xxhash

from torchtrain.errors import StorageError, TorchtrainError

T = TypeVar("T")

MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Of a file system, and not of a full disk or of rights.
MAY_PASS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN)
PAUSES_SECONDS = (0.25, 1.0, 2.0)
BLOCK_BYTES = 16 * 2**20  # read, hashed or written at once


def patiently(read: Callable[[], T], path: Path, pauses_seconds: Sequence[float] = PAUSES_SECONDS) -> T:
    """``read()`` of ``path``, tried again after each of the pauses where the file system fails.

    Raises:
        StorageError: it fails each time.
    """
    for pause in (*pauses_seconds, None):
        try:
            return read()
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link to itself is as good as none
                raise FileNotFoundError(error.errno, error.strerror, error.filename) from error
            if isinstance(error, MISSING) or error.errno == errno.ENAMETOOLONG:  # a mistake, not a failure
                raise
            if pause is None:
                raise unreadable(path, error, len(pauses_seconds) + 1) from error
            time.sleep(pause)
    raise AssertionError


def unreadable(path: Path, error: OSError, attempts: int = len(PAUSES_SECONDS) + 1) -> StorageError:
    where, why = error.filename or path, error.strerror or error
    told = StorageError(
        f"{where} cannot be read: {why}, in {attempts} attempts. Nothing was changed: start again when the file system "
        "answers and lets this user read"
    )
    if isinstance(error, PermissionError):
        told.exit_code = TorchtrainError.exit_code  # trying again later would not help
    return told


def read_file(path: Path) -> bytes:
    """The content of a regular file. MISSING where it is none, StorageError where the file system fails."""

    def read() -> bytes:
        require_regular(path)
        return path.read_bytes()

    return patiently(read, path)


def require_regular(path: Path) -> None:
    """Raise IsADirectoryError unless ``path`` is a regular file: opening a pipe would wait for whoever writes to it."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise IsADirectoryError(None, "is no regular file", str(path))


def hash_of(path: Path, start: int = 0, size_bytes: int | None = None) -> str:
    """XXH3-128 of ``size_bytes`` in the file from ``start`` on, by default of all of it, in hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = os.fstat(file.fileno()).st_size - start if size_bytes is None else size_bytes
        while block := file.read(min(left, BLOCK_BYTES)):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def is_own_file(path: Path) -> bool:
    """Whether ``path`` is a regular file, and not a link out of its folder but to the ``blobs`` of a hub's cache.

    A folder from elsewhere may hold links to anything, devices and pipes that never end among them. OSError.
    """
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        if target.parent.name != "blobs" and not target.is_relative_to(path.parent.resolve()):
            return False
    return stat.S_ISREG(path.stat().st_mode)


def printable(name: str) -> str:
    """``name``, which a file gives, for a message: as Python writes it where a terminal would obey it."""
    return name if name.isprintable() else repr(name)


def names_in(folder: Path) -> list[str]:
    """Names of what lies in ``folder``; none where there is no folder. Not ``Path.glob``, which hides errors."""
    try:
        return sorted(patiently(lambda: os.listdir(folder), folder))
    except MISSING:
        return []
