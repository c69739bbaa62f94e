"""List the tokens in the cache, or remove them: ``python -m torchtrain.cache [--clear]``.

The first run that reads a text tokenizes it into a folder of the cache, TORCHTRAIN_CACHE, for all later runs.
"""

import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from torchtrain.cli import command, run_and_exit
from torchtrain.config.command_options import parse_command
from torchtrain.datasets.cache_folder import (
    cache_folder,
    lock_file,
    locked,
    size_of,
    tokens_root,
    unused,
    used_file,
    windows_root,
)
from torchtrain.errors import DataError
from torchtrain.files import names_in, printable
from torchtrain.logging import counted, output_width

NAME = re.compile("[0-9a-f]{32}")
PROBE = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{32}\.\d+")
PROBE_SECONDS = 3600  # a start that is older has been killed


@dataclass(frozen=True)
class CacheOptions:
    clear: bool = False
    """Remove all that no run uses."""


@dataclass(frozen=True)
class Entry:
    """A folder of tokens in the cache."""

    folder: Path
    source: str
    """Name of the text."""
    tokens: str
    """Number of tokens, or why it is not known."""
    size: int
    """In bytes."""
    used: float
    """Time of the start of the last run that has used it, in seconds since the epoch."""


@command
def main(argv: Sequence[str]) -> int:
    """List or clear the cache, and return the exit code of the process."""
    options = parse_command(CacheOptions, "cache", __doc__, argv)
    lines = clear() if options.clear else listing()
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


def listing() -> Iterator[str]:
    """The lines of a table of the folders of tokens, the last used first, and the total."""
    found = sorted(entries(), key=lambda entry: -entry.used)
    if found:
        yield f"{tokens_root()}:"
        names = [entry.folder.name for entry in found]
        lines = _table(found, names)
        if max(map(len, lines)) > (output_width() or sys.maxsize):
            lines = _table(found, [f"{name[:8]}*" for name in names])  # a pattern for the shell
        yield from lines
    windows = size_of(windows_root())
    total = sum(entry.size for entry in found) + windows
    packed = f", and {_megabytes(windows)} of packed windows" if windows else ""
    texts = counted(len(found), "folder")
    yield f"{cache_folder()}: {_megabytes(total)} in {texts} of tokens{packed}"


def _table(found: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """A line for each of ``found``, below a heading; ``names``: those of their folders."""
    rows = [("size", "last used", "tokens", "folder", "text")]
    for entry, name in zip(found, names, strict=True):
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        rows.append((_megabytes(entry.size), day, entry.tokens, name, printable(entry.source)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{size:>{widths[0]}}  {used:{widths[1]}}  {tokens:>{widths[2]}}  {name:{widths[3]}}  {source}"
        for size, used, tokens, name, source in rows
    ]


def entries() -> Iterator[Entry]:
    """The folders of tokens."""
    from torchtrain.datasets.token_folder import MANIFEST, UNFINISHED, LocalFolder, TokenManifest

    for folder in _folders():
        source, tokens = "", "incomplete"
        is_complete = (folder / MANIFEST).exists()
        try:
            manifest = TokenManifest.read(LocalFolder(folder), str(folder), MANIFEST if is_complete else UNFINISHED)
            source = manifest.source
            if is_complete:
                tokens = f"{sum(shard.tokens for shard in manifest.shards):,}"
        except DataError:
            tokens = "damaged" if is_complete else tokens
        used = used_file(folder)
        yield Entry(folder, source, tokens, size_of(folder), (used if used.exists() else folder).stat().st_mtime)


def clear() -> Iterator[str]:
    """Remove all that no run uses; lines about what is removed and what is kept."""
    root, removed, kept = tokens_root(), 0, []
    names = {name.partition(".")[0] for name in names_in(root)}
    for folder in (root / name for name in sorted(names) if NAME.fullmatch(name)):
        size = size_of(folder)
        try:
            _remove(folder)
            removed += size
        except BlockingIOError:
            kept.append(f"{folder}, {_megabytes(size)}, is kept: a run uses it")
        except OSError as error:
            kept.append(f"{folder}, {_megabytes(size)}, is not removed: {error.strerror or error}")
    for path in (windows_root() / name for name in names_in(windows_root()) if NAME.fullmatch(name.partition(".")[0])):
        with suppress(OSError), locked(lock_file(path), wait=False):
            removed += path.stat().st_size
            path.unlink()
            lock_file(path).unlink(missing_ok=True)
    for probe in (root / name for name in names_in(root) if PROBE.fullmatch(name)):
        with suppress(OSError):
            if time.time() - probe.stat().st_mtime > PROBE_SECONDS:
                probe.unlink()
    yield f"{cache_folder()}: {_megabytes(removed)} were removed"
    yield from kept


def _remove(folder: Path) -> None:
    """Remove a folder of tokens and its lock files.

    Raises:
        BlockingIOError: a run uses it.
        OSError: it cannot be removed, or the file system has no locks.
    """
    from torchtrain.datasets.token_folder import MANIFEST

    with locked(lock_file(folder), wait=False), ExitStack() as stack:
        stack.enter_context(unused(used_file(folder)))
        (folder / MANIFEST).unlink(missing_ok=True)  # first: if this command is killed, the folder is not complete
        if folder.is_dir():
            shutil.rmtree(folder)
        used_file(folder).unlink(missing_ok=True)
        lock_file(folder).unlink(missing_ok=True)


def _folders() -> list[Path]:
    return [tokens_root() / name for name in names_in(tokens_root()) if NAME.fullmatch(name)]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


if __name__ == "__main__":
    run_and_exit(main)
