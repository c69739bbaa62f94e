"""Files and folders that a command is asked to write: checked before its work begins."""

import errno
import fcntl
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtrain.errors import ConfigError, StorageError, TorchtrainError
from torchtrain.reading import MAY_PASS, names_in

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
        if error.errno in MAY_PASS:
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
def written_whole(path: Path, *, flush: bool = False) -> Iterator[Any]:
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
