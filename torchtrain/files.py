"""Files: reads that are retried, output paths that are checked before work begins, atomic writes.

A read is retried where the file system fails. A missing file is not retried: ``FileNotFoundError`` and its like are
raised at once.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from torchtrain.errors import ConfigError, StorageError, TorchtrainError

T = TypeVar("T")


MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


# Of a file system, and not of a full disk or of rights.
TRANSIENT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN)


PAUSES_SECONDS = (0.25, 1.0, 2.0)


BLOCK_BYTES = 16 * 2**20  # read, hashed or written at once


def with_retries(read: Callable[[], T], path: Path, pauses_seconds: Sequence[float] = PAUSES_SECONDS) -> T:
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

    return with_retries(read, path)


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
        return sorted(with_retries(lambda: os.listdir(folder), folder))
    except MISSING:
        return []


PARTIAL_SUFFIX = ".partial"


NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks


def require_folder(folder: Path, given: str) -> None:
    """Make ``folder``; ConfigError where there can be none, or this user may not write to it,
    StorageError where the file system fails.

    ``given``: the option and its value, as in ``job.dump_folder = 'outputs'``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written to")
    except OSError as error:
        why = error.strerror or str(error)
        if isinstance(error, FileExistsError):
            why = dangling(Path(error.filename)) or why
        problem = f"{given} cannot be used: {why}"
        if error.errno in TRANSIENT_ERRNOS:
            raise StorageError(f"{problem}. Start again when the file system answers") from error
        if error.errno not in NO_SPACE:  # what is there already may yet be removed
            raise ConfigError(f"{problem}; name another folder") from error


def dangling(path: Path) -> str:
    """What a link that leads nowhere is, in words; empty where ``path`` is none."""
    if not path.is_symlink() or path.exists():
        return ""
    return f"{path} is a link to {os.readlink(path)!r}, which does not exist: create that folder, or remove the link"


def require_file(path: str, option: str) -> None:
    """Make the folder of ``path``, the value of ``option``; ConfigError where no file can be written there."""
    if Path(path).is_dir():
        raise ConfigError(f"{option} = {path!r} is a folder; name a file in it")
    require_folder(Path(path).parent, f"{option} = {path!r}")


def require_picture(path: str, option: str) -> None:
    """``require_file`` for a PNG file, which needs matplotlib."""
    if Path(path).suffix != ".png":
        raise ConfigError(f"{option} = {path!r} must end with .png")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{option} = {path!r} needs matplotlib: pip install 'torchtrain[plot]'")
    require_file(path, option)


@contextmanager
def writing(path: str, option: str) -> Iterator[None]:
    """Within ``path``, the value of ``option``, is written. TorchtrainError where it fails, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise TorchtrainError(
            f"{option} = {path!r} could not be written: {error.strerror or error}; make room, or name another file"
        ) from error


def partial_path(path: Path) -> Path:
    """A new name, ``<path>.ID.partial``, for what is to become ``path``, or was."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}")


@contextmanager
def atomic_write(path: Path, *, flush: bool = False) -> Iterator[Any]:
    """A binary file that gets its name once all of it is written. A killed process leaves a ``.partial`` of its own.

    ``flush``: write it to disk before it gets its name, so that a loss of power leaves no cut file under that name.
    """
    # Nobody can know this name beforehand and make a link of it; mode "x" would not follow one.
    partial = partial_path(path)
    try:
        with open(partial, "xb", buffering=1 << 20) as file:
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:  # as on a full disk, which should not stay full of it
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def open_lock_file(path: Path) -> int:
    """A descriptor of the lock file ``path``, which is made where it is missing, and never changed.

    Raises:
        ConfigError: it is a link, a pipe or a device. Others may be able to write to its folder, so links are not
            followed.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # ENXIO: a socket
            raise
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise ConfigError(f"{path} must be a regular file to serve as a lock, and is a link or a device: remove it")


def discard(folder: Path, target: Path) -> None:
    """Remove ``folder``, which another process may still be writing. OSError if it cannot be renamed.

    It is first renamed as a whole, to a new ``partial_path(target)``: so the other process cannot give its final name
    to a folder that is half removed.
    """
    moved = partial_path(target)
    with suppress(FileNotFoundError):
        folder.rename(moved)
    shutil.rmtree(moved, ignore_errors=True)


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """The path ``<target>.ID.partial`` for a folder to write and then rename to ``target``. Removed at the end.

    Those that killed processes have left are removed first. A process that is alive holds the lock of its
    ``<target>.ID.lock``.

    Raises:
        TorchtrainError: nothing can be written there.
    """
    partial = partial_path(target)
    lock = partial.with_suffix(".lock")
    with ExitStack() as stack:
        try:
            _discard_partial_folders(target)
            descriptor = open_lock_file(lock)
            stack.callback(lambda: lock.unlink(missing_ok=True))
            stack.callback(os.close, descriptor)
            stack.callback(shutil.rmtree, partial, ignore_errors=True)
            _lock_or_pass(descriptor)
        except OSError as error:
            raise TorchtrainError(
                f"{target} could not be written: {error.strerror or error}; make room, or let this user write there"
            ) from error
        yield partial


def _discard_partial_folders(target: Path) -> None:
    """Remove what killed processes have left of ``partial_folder``."""
    names = names_in(target.parent)
    found = (
        re.fullmatch(rf"{re.escape(target.name)}\.([0-9a-f]{{8}}|[0-9a-f]{{32}})\.(partial|lock)", n) for n in names
    )
    for lock in {target.with_name(f"{target.name}.{match[1]}.lock") for match in found if match}:
        with suppress(BlockingIOError), ExitStack() as stack:
            if lock.name in names:
                descriptor = open_lock_file(lock)
                stack.callback(os.close, descriptor)
                if not _lock_or_pass(descriptor):
                    continue
            discard(lock.with_suffix(PARTIAL_SUFFIX), target)
            lock.unlink(missing_ok=True)


def _lock_or_pass(descriptor: int) -> bool:
    """Lock a file without waiting. False where the file system has no locks; BlockingIOError: another holds it."""
    try:
        # Not lockf, with which a process that opens a second descriptor, and closes it, lets go of the lock.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def fsync_folder(folder: Path, *files: str) -> None:
    """Flush ``files`` in a folder, and its entries, to disk: names of new files and renames are not safe before."""
    with ThreadPoolExecutor(len(files) + 1) as pool:
        # One commit of the file system's journal serves all that ask for it at the same time.
        list(pool.map(_fsync, [folder, *(folder / file for file in files)]))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
