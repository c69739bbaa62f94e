"""File operations: reads with retries, validation of output paths before work begins, atomic writes, lock files.

A read is retried after transient errors of the file system. A missing file is not retried: the exceptions in
``MISSING``, such as ``FileNotFoundError``, are raised immediately.
"""

import errno
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from torchtrain.errors import ConfigError, StorageError, TorchtrainError

T = TypeVar("T")


URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)


def scheme_of(location: str | Path) -> str:
    """The scheme of a URL in lower case; an empty string for a path."""
    match = URL.fullmatch(str(location))
    return match[1].lower() if match else ""


def is_url(location: str | Path) -> bool:
    """Whether ``location`` is a URL, and not a path."""
    return scheme_of(location) != ""


def local_path(location: str) -> Path | None:
    """The path of a local folder or file, which may be given as a URL file://; None for any other URL."""
    match = URL.fullmatch(location)
    if match is None:
        return Path(location)
    return Path(match[2]) if match[1].lower() in ("file", "local") else None


MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


# Transient I/O errors of a file system; a full disk or missing permissions are not transient.
TRANSIENT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN)


PAUSES_SECONDS = (0.25, 1.0, 2.0)


MAX_SMALL_FILE_BYTES = 2**28  # of a file that is read at once; the manifest of a folder of tokens has 500 bytes a shard
BLOCK_BYTES = 16 * 2**20  # size of the blocks in which large files are read, hashed and written


def with_retries(read: Callable[[], T], path: Path | str, pauses_seconds: Sequence[float] = PAUSES_SECONDS) -> T:
    """Call ``read()``, which reads ``path``, and retry it after each of the pauses if the file system fails.

    Raises:
        StorageError: the last attempt failed, too.
    """
    for pause in (*pauses_seconds, None):
        try:
            return read()
        except OSError as error:
            if error.errno == errno.ELOOP:  # treat a link to itself as a missing file
                raise FileNotFoundError(error.errno, error.strerror, error.filename) from error
            if isinstance(error, MISSING) or error.errno == errno.ENAMETOOLONG:  # an invalid path, not a failure
                raise
            if pause is None:
                raise unreadable(path, error, len(pauses_seconds) + 1) from error
            time.sleep(pause)
    raise AssertionError


def unreadable(path: Path | str, error: OSError, attempts: int = len(PAUSES_SECONDS) + 1) -> StorageError:
    """The StorageError for a ``path`` that could not be read in so many ``attempts``; ``error``: of the last one."""
    where, why = error.filename or path, error.strerror or error
    storage_error = StorageError(
        f"{where} cannot be read: {why}, in {attempts} attempts. Nothing was changed: start again when the file system "
        "answers and lets this user read"
    )
    if isinstance(error, PermissionError):
        storage_error.exit_code = TorchtrainError.exit_code  # trying again later would not help
    return storage_error


def read_file(
    path: Path, error_type: type[TorchtrainError] = TorchtrainError, most_bytes: int = MAX_SMALL_FILE_BYTES
) -> bytes:
    """Read a regular file, with retries.

    Raises:
        FileNotFoundError, NotADirectoryError, IsADirectoryError: ``path`` is not a regular file (``MISSING``).
        error_type: it has more than ``most_bytes``. A sparse file of any size takes no space on a disk.
        StorageError: the file system fails.
    """

    def read() -> bytes:
        require_regular(path)
        require_size(path, path.stat().st_size, error_type, most_bytes)
        return path.read_bytes()

    return with_retries(read, path)


def require_size(
    name: Path | str, size_bytes: int, error_type: type[TorchtrainError], most_bytes: int = MAX_SMALL_FILE_BYTES
) -> None:
    """Raise ``error_type`` if the file ``name``, which is to be read at once, has more than ``most_bytes``."""
    if size_bytes > most_bytes:
        raise error_type(f"{name} has {size_bytes:,} bytes, more than a file of its kind may have ({most_bytes:,})")


def parse_json(content: bytes | str, name: Path | str, error_type: type[TorchtrainError]) -> Any:
    """The value in the JSON ``content`` of the file ``name``, which nobody vouches for.

    Raises:
        error_type: it is not JSON, larger than ``MAX_SMALL_FILE_BYTES``, or nested too deeply.
    """
    require_size(name, len(content), error_type)
    try:
        return json.loads(content)
    except RecursionError:
        raise error_type(f"{name} is damaged: its values are nested too deeply") from None
    except ValueError as error:
        raise error_type(f"{name} is damaged: {printable(str(error))}") from None


def json_object(content: bytes | str) -> dict[str, Any] | None:
    """The JSON object in ``content``; None if it is none, or ``parse_json`` has an error.

    For what is passed over where it is damaged, such as a line of metrics.jsonl that a kill has cut short.
    """
    try:
        value = parse_json(content, "", TorchtrainError)
    except TorchtrainError:
        return None
    return value if isinstance(value, dict) else None


def require_regular(path: Path) -> None:
    """Raise IsADirectoryError unless ``path`` is a regular file: opening a pipe blocks until something writes to it."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise IsADirectoryError(None, "is not a regular file", str(path))


def hash_of(path: Path, start: int = 0, size_bytes: int | None = None) -> str:
    """XXH3-128 hash, in hex, of ``size_bytes`` bytes of a file from the offset ``start`` on; by default to its end."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = os.fstat(file.fileno()).st_size - start if size_bytes is None else size_bytes
        while block := file.read(min(left, BLOCK_BYTES)):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def is_own_file(path: Path) -> bool:
    """Whether ``path`` is a regular file, and not a link that leads out of its folder.

    Links to the ``blobs`` folder of a Hugging Face hub cache are allowed. A folder of unknown origin may contain links
    to any file, among them devices and pipes that never end.

    Raises:
        OSError: the file is missing or cannot be accessed.
    """
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        if target.parent.name != "blobs" and not target.is_relative_to(path.parent.resolve()):
            return False
    return stat.S_ISREG(path.stat().st_mode)


def printable(name: str) -> str:
    """``name`` for use in a message: unchanged, or its ``repr`` if it contains control characters."""
    return name if name.isprintable() else repr(name)


def names_in(folder: Path) -> list[str]:
    """Sorted names of the entries of ``folder``, with retries; an empty list if ``folder`` is missing.

    Unlike ``Path.glob`` it raises errors of the file system (StorageError).
    """
    try:
        return sorted(with_retries(lambda: os.listdir(folder), folder))
    except MISSING:
        return []


PARTIAL_SUFFIX = ".partial"


NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system without locks


def require_folder(folder: Path, given: str) -> None:
    """Create ``folder`` if it is missing, and check that it is writable.

    Args:
        folder: the folder.
        given: the option and its value for the error message, such as ``job.dump_folder = 'outputs'``.

    Raises:
        ConfigError: the folder cannot be created, or this user may not write to it.
        StorageError: the file system fails.
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
            raise StorageError(f"{problem}. Start again when the file system responds") from error
        if error.errno not in NO_SPACE:  # a full disk is accepted: a run may free space by deleting old checkpoints
            raise ConfigError(f"{problem}; name another folder") from error


def dangling(path: Path) -> str:
    """The error message about ``path`` if it is a dangling symbolic link, else an empty string."""
    if not path.is_symlink() or path.exists():
        return ""
    return f"{path} is a link to {os.readlink(path)!r}, which does not exist: create that folder, or remove the link"


def require_file(path: str, option: str) -> None:
    """Create the folder of the output file ``path``, the value of ``option``; ConfigError if it cannot be written."""
    if Path(path).is_dir():
        raise ConfigError(f"{option} = {path!r} is a folder; name a file in it")
    require_folder(Path(path).parent, f"{option} = {path!r}")


def require_picture(path: str, option: str) -> None:
    """``require_file`` for a PNG file, which also needs matplotlib."""
    if Path(path).suffix != ".png":
        raise ConfigError(f"{option} = {path!r} must end with .png")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{option} = {path!r} needs matplotlib: pip install matplotlib")
    require_file(path, option)


@contextmanager
def writing(path: str, option: str) -> Iterator[None]:
    """A context manager for writing ``path``, the value of ``option``: turns OSError into TorchtrainError."""
    try:
        yield
    except OSError as error:
        raise TorchtrainError(
            f"{option} = {path!r} could not be written: {error.strerror or error}; free space, or name another file"
        ) from error


def partial_path(path: Path) -> Path:
    """A new unique name, ``<path>.ID.partial``, for a file or folder before it is renamed to ``path``, or removed."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}")


@contextmanager
def atomic_write(path: Path, *, flush: bool = False) -> Iterator[Any]:
    """Atomic write: a context manager that yields a binary file, which is renamed to ``path`` when the body ends.

    If the body raises, nothing is left; a killed process leaves a file that ends in ``.partial``.

    Args:
        path: the final name.
        flush: fsync the file before the rename, so that a power failure leaves no truncated file of that name.
    """
    # The random name and mode "x" keep other users from placing a link there, which open would follow.
    partial = partial_path(path)
    try:
        with open(partial, "xb", buffering=1 << 20) as file:
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:  # remove the partial file, which may have filled the disk
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def open_lock_file(path: Path) -> int:
    """Open the lock file ``path``, and create it if it is missing; its content is never changed.

    Returns:
        The file descriptor.

    Raises:
        ConfigError: ``path`` is a link, a pipe or a device. Other users may be able to write to its folder, therefore
            links are not followed.
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
    raise ConfigError(
        f"{path} must be a regular file, because it is used as a lock file, but is a link or a device: remove it"
    )


def discard(folder: Path, target: Path) -> None:
    """Remove ``folder``, to which another process may still be writing.

    It is first renamed to a new ``partial_path(target)``, so that the other process cannot rename a half-removed folder
    to its final name ``target``.

    Raises:
        OSError: the folder cannot be renamed.
    """
    moved = partial_path(target)
    with suppress(FileNotFoundError):
        folder.rename(moved)
    shutil.rmtree(moved, ignore_errors=True)


def fsync_folder(folder: Path, *files: str) -> None:
    """fsync ``files`` in a folder, and the folder itself, which makes new file names and renames durable."""
    with ThreadPoolExecutor(len(files) + 1) as pool:
        # Concurrent calls of fsync share one commit of the file system's journal.
        list(pool.map(_fsync, [folder, *(folder / file for file in files)]))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
