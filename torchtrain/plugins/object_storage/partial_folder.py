"""A folder that is written under another name, so that it appears complete or not at all."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torchtrain.errors import TorchtrainError
from torchtrain.files import NO_LOCKS, PARTIAL_SUFFIX, discard, names_in, open_lock_file, partial_path


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """A context manager that yields the path ``<target>.ID.partial`` of a folder to write and then rename to
    ``target``.

    If it was not renamed, the folder is removed at the end. Folders that killed processes have left are removed first:
    a live process holds a lock on its file ``<target>.ID.lock``.

    Raises:
        TorchtrainError: the folder of ``target`` cannot be written.
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
            _try_lock(descriptor)
        except OSError as error:
            raise TorchtrainError(
                f"{target} could not be written: {error.strerror or error}; free space, or let this user write there"
            ) from error
        yield partial


def _discard_partial_folders(target: Path) -> None:
    """Remove the partial folders and lock files that killed processes have left."""
    names = names_in(target.parent)
    found = (
        re.fullmatch(rf"{re.escape(target.name)}\.([0-9a-f]{{8}}|[0-9a-f]{{32}})\.(partial|lock)", n) for n in names
    )
    for lock in {target.with_name(f"{target.name}.{match[1]}.lock") for match in found if match}:
        with suppress(BlockingIOError), ExitStack() as stack:
            if lock.name in names:
                descriptor = open_lock_file(lock)
                stack.callback(os.close, descriptor)
                if not _try_lock(descriptor):
                    continue
            discard(lock.with_suffix(PARTIAL_SUFFIX), target)
            lock.unlink(missing_ok=True)


def _try_lock(descriptor: int) -> bool:
    """Lock a file without waiting. Returns False if the file system has no locks.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        # Not lockf, whose lock is released when the process closes any other descriptor of the file.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True
