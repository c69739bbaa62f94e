"""Files and folders that a command is asked to write: checked before its work begins."""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtrain.errors import ConfigError, StorageError, TorchtrainError
from torchtrain.reading import MAY_PASS


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
        problem = f"{given} cannot be used: {error.strerror or error}"
        if error.errno in MAY_PASS:
            raise StorageError(f"{problem}. Start again when the file system answers") from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # what is there already may yet be removed
            raise ConfigError(f"{problem}; name another folder") from error


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


@contextmanager
def written_whole(path: Path, *, flush: bool = False) -> Iterator[Any]:
    """A binary file that gets its name once all of it is written. A killed process leaves a ``.partial`` of its own.

    ``flush``: write it to disk before it gets its name, so that a loss of power leaves no cut file under that name.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb", buffering=1 << 20) as file:
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:  # as on a full disk, which should not stay full of it
        partial.unlink(missing_ok=True)
        raise


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
