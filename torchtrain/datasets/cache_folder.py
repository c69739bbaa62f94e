"""The cache of what is computed from data once: the folder, and locks in it."""

import errno
import fcntl
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtrain.errors import ConfigError
from torchtrain.files import MISSING, NO_LOCKS, is_url, open_lock_file

VARIABLE = "TORCHTRAIN_CACHE"


def cache_folder() -> Path:
    """``TORCHTRAIN_CACHE``; without it, ``torchtrain`` in ``XDG_CACHE_HOME``, by default ``~/.cache``.

    Raises:
        ConfigError: ``TORCHTRAIN_CACHE`` is a URL, or this user has no home folder.
    """
    own = os.environ.get(VARIABLE)
    if own and is_url(own):
        raise ConfigError(
            f"{VARIABLE} = {own!r} must be a local folder: to train on tokens in a bucket, write them by "
            "torchtrain.prepare"
        )
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "torchtrain")
    try:
        return folder.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{folder}, the cache for tokens: {error}; set {VARIABLE} to a folder") from None


def require_outside(folder: str) -> None:
    """Raise ConfigError if the cache is in a ``folder`` of data, where its files would become part of the data."""
    cache, of_data = cache_folder().resolve(), Path(folder).resolve()
    inner = cache.relative_to(of_data).parts if cache.is_relative_to(of_data) else (".",)
    if not any(part.startswith(".") for part in inner):  # hidden files are no data
        raise ConfigError(
            f"the cache for tokens, {cache}, is inside the data folder {folder!r}, so that its files would become part "
            f"of the data: set {VARIABLE} to a folder elsewhere"
        )


def tokens_root() -> Path:
    """The folder for the folders of tokens."""
    return cache_folder() / "tokens"


def windows_root() -> Path:
    """The folder for the windows of ``data.packing = "best_fit"``."""
    return cache_folder() / "windows"


def lock_file(path: Path) -> Path:
    """The file that is locked while ``path``, in the cache, is written or removed."""
    return path.with_suffix(".lock")


def used_file(folder: Path) -> Path:
    """The file that each process locks, and sets the time of, which reads the tokens in ``folder`` (``Use``)."""
    return folder.with_suffix(".used")


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder and the folders in it."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(*MISSING):  # renamed or removed meanwhile
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None, *, wait: bool = True) -> Iterator[None]:
    """Lock the file ``path`` against other processes; calls ``on_wait`` if another one has it. It ends with the
    process. Where the file system has no locks, it does nothing.

    Raises:
        OSError: the folder cannot be written. BlockingIOError: another process has it, and ``wait`` is False.
    """

    def lock(descriptor: int) -> None:
        # Not flock, whose lock the worker processes would inherit.
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both
            if not wait:
                raise BlockingIOError(errno.EAGAIN, "another process has locked it", str(path)) from None
            on_wait()
            fcntl.lockf(descriptor, fcntl.LOCK_EX)

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _open_locked(path, lock)
    try:
        yield
    finally:
        os.close(descriptor)


class Use:
    """States that a run uses something in the cache, and when: a shared lock of the file ``path``, which ends with this
    object or the process. Where the file cannot be written or locked, it does nothing."""

    def __init__(self, path: Path) -> None:
        with suppress(OSError):
            descriptor = _open_locked(path, lambda descriptor: fcntl.flock(descriptor, fcntl.LOCK_SH))
            weakref.finalize(self, os.close, descriptor)
            os.utime(descriptor)


@contextmanager
def unused(path: Path) -> Iterator[None]:
    """A context manager in which no ``Use`` of ``path`` begins.

    Raises:
        BlockingIOError: there is one.
        OSError: the file system has no locks, or the file cannot be written.
    """
    descriptor = open_lock_file(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _open_locked(path: Path, lock: Callable[[int], None]) -> int:
    """Open the lock file ``path`` and lock it; again if another process has removed it meanwhile."""
    while True:
        descriptor = open_lock_file(path)
        try:
            try:
                lock(descriptor)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            with suppress(*MISSING):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
