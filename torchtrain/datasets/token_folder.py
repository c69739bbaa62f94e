"""Folders of tokens: their files, and the manifest that makes a folder complete.

A folder has ``manifest.json`` and two files for each shard: ``<shard>.tokens`` (little-endian uint16, or uint32 for a
vocabulary above 65,536: bos, text and eos of each document) and ``<shard>.documents``, the index of its documents:
little-endian columns of 8 bytes for each document, in the order of ``COLUMNS``, after the offset of each document in
tokens and the number of tokens.
"""

import contextlib
import errno
import fcntl
import functools
import os
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torchtrain.config.parse import from_toml
from torchtrain.config.registry import TOKEN_FOLDERS
from torchtrain.config.section import require
from torchtrain.datasets.data_source import SourceContext
from torchtrain.datasets.text_input import read_with_retries
from torchtrain.errors import ConfigError, DataError
from torchtrain.files import (
    MISSING,
    atomic_write,
    hash_of,
    local_path,
    open_lock_file,
    parse_json,
    partial_path,
    read_file,
    with_retries,
)

MANIFEST = "manifest.json"
UNFINISHED = "unfinished.json"  # a manifest without shards, until all shards are written
FILES = "files.json"  # the names of the files of text
COLUMNS = ("bytes", "token_bytes", "file", "number", "hash_high", "hash_low")
"""Of each document: the bytes of its text in UTF-8; the bytes that its tokens stand for by the tokenizer's
``token_bytes``; the number of its file, and its number among the documents of this file in the shard; ``text_hash``."""
_FORMAT: Literal[2] = 2
SHARD_NAME = re.compile(r"shard-[0-9]{5,}")

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
    def write(self, name: str) -> AbstractContextManager[Any]:
        """Context manager that yields a binary file, which is stored under its name when the body ends without an
        error."""

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
        # Without a reference to this object, so that its files are closed as soon as it is not used.
        self._file = functools.lru_cache(_OPEN_FILES)(lambda name: _File(path / name))
        self._path_of = functools.lru_cache(_OPEN_FILES)(lambda name: path / name)  # which takes as long as a read

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
        return [read_with_retries(functools.partial(self._pread, *one), self._path_of(one[0])) for one in ranges]

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

    def write(self, name: str) -> AbstractContextManager[Any]:
        return atomic_write(self.path / name, flush=True)

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


def open_folder(location: str | Path, option: str = "", context: SourceContext | None = None) -> DataFolder:
    """The folder at a path or URL, which need not exist.

    Args:
        location: the path or URL.
        option: its option, for messages.
        context: that of the source; None if it is not one.

    Raises:
        ConfigError: the scheme of the URL is unknown, or its package is not installed.
    """
    path = local_path(str(location))
    if path is not None:
        return LocalFolder(path)
    folder: DataFolder = TOKEN_FOLDERS["url"](str(location), option, context)
    return folder


def is_token_folder(location: str | Path, option: str = "", context: SourceContext | None = None) -> bool:
    """Whether there is a complete folder of tokens at a path or URL; raises as ``open_folder``."""
    return MANIFEST in open_folder(location, option, context).sizes()


@dataclass(frozen=True)
class Shard:
    """The entry of a shard in the manifest."""

    name: str
    tokens: int
    """Number of tokens."""
    documents: int
    """Number of documents."""
    bytes: int
    """Size of its text in UTF-8."""
    skipped: int
    """Number of documents that are not text, which were skipped."""
    tokens_hash: str
    documents_hash: str
    first_file: int = 0
    """Number of its first file of text."""
    numbers: tuple[int, ...] = ()
    """For this and each following file that has a part in the shard, how many documents the part has, skipped ones
    included."""
    malformed: int = 0
    """Number of malformed lines of the input, which were skipped."""
    first_malformed: str = ""
    """File and location of the first malformed line."""
    not_utf8: tuple[str, ...] = ()
    """Files of the input that were skipped because they are not UTF-8."""

    @staticmethod
    def from_json(content: dict[str, Any]) -> "Shard":
        """The shard in parsed JSON; TypeError if it is not one."""
        lists = {key: tuple(content.get(key, ())) for key in ("numbers", "not_utf8")}
        return Shard(**{**content, **lists})

    @property
    def index_bytes(self) -> int:
        """Size of the index of its documents."""
        return 8 * (self.documents * (1 + len(COLUMNS)) + 1)


@dataclass(frozen=True)
class TokenManifest:
    """Metadata of a folder of tokens."""

    tokenizer_hash: str
    vocab_size: int
    source: str
    """Name of the source."""
    source_identity: str
    """Identity of the text."""
    shard_count: int
    """Number of shards, also before they are written."""
    shards: tuple[Shard, ...] = ()
    options: str = ""
    """``TextInput.options``."""
    format: Literal[2] = _FORMAT

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @staticmethod
    def read(folder: DataFolder, label: str, name: str = MANIFEST) -> "TokenManifest":
        """Read a manifest; DataError if the file is missing, damaged or of another version."""
        try:
            content = parse_json(folder.read(name), f"{label}: its {name}", DataError)
        except MISSING as error:
            raise DataError(f"{label}: cannot read its {name}: {error!r}; tokenize the text again") from error
        if isinstance(content, dict) and content.get("format") == 1:
            raise DataError(
                f"{label} was written by an older version of torchtrain.prepare, without an index of its documents: "
                "tokenize the text again into an empty folder"
            )
        try:
            manifest = from_toml(TokenManifest, content)
            _check(manifest)
        except (ConfigError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{label}: its {name} is damaged: {error}; tokenize the text again") from error
        return manifest


def _check(manifest: TokenManifest) -> None:
    """Raise ConfigError if the values of ``manifest`` contradict each other."""
    names = [shard.name for shard in manifest.shards]
    require(len(set(names)) == len(names), "it names a shard twice")
    require(manifest.vocab_size >= 1, f"vocab_size = {manifest.vocab_size}")
    for shard in manifest.shards:
        require(SHARD_NAME.fullmatch(shard.name) is not None, f"{shard.name!r} is not the name of a shard")
        counts = [(key, value) for key, value in vars(shard).items() if isinstance(value, int)]
        for key, count in [*counts, *(("numbers", number) for number in shard.numbers)]:
            require(0 <= count < 2**60, f"{shard.name} has {key} = {count}")
        require(
            shard.documents <= shard.tokens, f"{shard.name} has {shard.documents} documents in {shard.tokens} tokens"
        )


def verify(folder: DataFolder, label: str) -> TokenManifest:
    """Hash all files; DataError names the first file whose hash differs from the manifest."""
    manifest = TokenManifest.read(folder, label)
    for shard in manifest.shards:
        if damaged := damaged_file(folder, shard):
            raise DataError(
                f"{label}: {damaged} is damaged or missing: its hash is not that of the manifest; tokenize the text "
                "again into an empty folder"
            )
    return manifest


def damaged_file(folder: DataFolder, shard: Shard) -> str | None:
    """Name of a file of ``shard`` that is missing or has another hash; None if there is none."""
    for suffix, expected in (("tokens", shard.tokens_hash), ("documents", shard.documents_hash)):
        name = f"{shard.name}.{suffix}"
        try:
            if folder.hash_of(name) != expected:
                return name
        except MISSING:
            return name
    return None
