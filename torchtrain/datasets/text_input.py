"""Text that is tokenized, divided into shards: files, which are read in ranges of bytes, and documents by number."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import xxhash

from torchtrain.datasets.data_identity import Identity
from torchtrain.datasets.data_source import SkippedText, TextInput
from torchtrain.datasets.file_formats import (
    NotUTF8Error,
    OnMalformed,
    documents,
    documents_in_range,
    ignore,
    is_splittable,
)
from torchtrain.errors import DataError, TorchtrainError
from torchtrain.files import MISSING, TRANSIENT_ERRNOS, hash_of, unreadable, with_retries

T = TypeVar("T")

MIN_SHARD_BYTES = 1 << 18  # minimum size of the text of a shard
MAX_SHARD_BYTES = 1 << 26  # of the input of a shard; of more than 1 TiB of input, shards are larger
MAX_SHARDS = 1 << 14
# Pauses before each retry of reading data, about four minutes in total.
PAUSES_SECONDS = (1, 2, 4, 8, 16, 32, 60, 60, 60)
SKIP_HINT = ", or skip and count such files by skip_not_utf8 = true beside the path"


def read_with_retries(read: Callable[[], T], path: Path) -> T:
    """Call ``read()``, which reads a file that existed at the start of the run, with retries for about four minutes."""
    try:
        return with_retries(read, path, PAUSES_SECONDS)
    except MISSING as error:
        raise _missing(path) from error


def _missing(location: Path | str) -> DataError:
    return DataError(f"{location} was there when the run began, and is missing now: restore it")


class TextDocuments(TextInput):
    """Documents by their number, such as those of a table or in memory.

    Args:
        count: the number of documents.
        name: for messages.

    Raises:
        DataError: there are no documents.
    """

    def __init__(self, count: int, name: str) -> None:
        if count == 0:
            raise DataError(f"{name} has no documents")
        self.name = name
        shards = max(64, min(4096, count // 1024)) if count >= 64 * 64 else 1
        self._borders = [count * number // shards for number in range(shards + 1)]
        self.shard_sizes = np.diff(self._borders).tolist()

    @abstractmethod
    def document(self, number: int) -> str | None:
        """Document ``number``, from 0; None if it is not text."""

    def read(self, shard: int, skipped: SkippedText) -> Iterator[tuple[int, int, str | None]]:  # noqa: ARG002
        first = self._borders[shard]
        for number in range(first, self._borders[shard + 1]):
            yield 0, number - first, self.document(number)


class TextsInMemory(TextDocuments):
    """Documents in memory."""

    def __init__(self, texts: Sequence[str], name: str) -> None:
        super().__init__(len(texts), name)
        self._texts = texts

    def identify(self) -> Identity:
        digest = xxhash.xxh3_128_hexdigest("\0".join(self._texts).encode("utf-8", "replace"))
        return Identity(f"{len(self._texts)} documents, hash {digest}")

    def document(self, number: int) -> str | None:
        return self._texts[number]


class InputFile(ABC):
    """A file of text.

    Args:
        location: path or URL.
        size: in bytes.
        name: a name that determines its format.
    """

    def __init__(self, location: str, size: int, name: str) -> None:
        self.location = location
        self.size = size
        self.name = name

    @abstractmethod
    def open(self) -> BinaryIO:
        """Open the file, which can seek."""

    def hash_of_range(self, start: int, stop: int) -> str:  # noqa: ARG002
        """Hash of the bytes in ``range(start, stop)``; "" if the identity of the files contains one of all content.

        Raises:
            DataError: the file has changed since it was opened.
        """
        return ""


class LocalFile(InputFile):
    """A local file; ``name``: another name that determines its format."""

    def __init__(self, path: Path, name: str = "") -> None:
        self._path = path
        self._stats = size, *_ = self._stat()
        super().__init__(str(path), size, name or path.name)

    def _stat(self) -> tuple[int, int, int]:
        stat = self._path.stat()
        # Users can set the modification time, but not the change time of the inode.
        return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns

    def open(self) -> BinaryIO:
        return self._path.open("rb")

    def hash_of_range(self, start: int, stop: int) -> str:
        digest = read_with_retries(partial(hash_of, self._path, start, stop - start), self._path)
        self.require_unchanged()
        return digest

    def require_unchanged(self) -> None:
        """Raise DataError if the size or a time of the file has changed since it was opened."""
        if read_with_retries(self._stat, self._path) != self._stats:
            raise changed(self.location)


@dataclass(frozen=True)
class Split:
    """The part of a file whose first byte is in ``range(start, stop)``, by lines, pieces or row groups."""

    file: int
    start: int
    stop: int


class TextFiles(TextInput):
    """Files of text.

    Args:
        files: the files in their order.
        column: the column that contains the text.
        name: name for messages.
        identify: returns the identity of the files.
        key: the ``cache_key``; "": the identity.
        identity_now: returns the text of the identity of what is found now, which is compared after all is read; None:
            each file is compared after it is read (``hash_of_range``).
        on_not_utf8: called if a file is not UTF-8, before this is raised; it may raise an error that names all of them.
        skip_not_utf8: skip and count files that are not UTF-8. They must be read twice, and are not split.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        column: str,
        name: str,
        identify: Callable[[], Identity],
        key: str = "",
        identity_now: Callable[[], str] | None = None,
        on_not_utf8: Callable[[], None] = lambda: None,
        *,
        skip_not_utf8: bool,
    ) -> None:
        self.name = name
        self.files = [file.location for file in files]
        self._files = files
        self.options = f"text_column = {column!r}, skip_not_utf8 = {skip_not_utf8}"
        self._column = column
        self._identify = identify
        self._key = key
        self._identity_now = identity_now
        self._on_not_utf8 = on_not_utf8
        self._skip_not_utf8 = skip_not_utf8
        splittable = [is_splittable(file.name, file.size) and not skip_not_utf8 for file in files]
        self._shards = split_files([file.size for file in files], splittable)
        self.shard_sizes = [sum(split.stop - split.start for split in shard) for shard in self._shards]

    def identify(self) -> Identity:
        return self._identify()

    def cache_key(self) -> str:
        return self._key or self.identify().text

    def content_hash(self, shard: int) -> str:
        splits = self._shards[shard]
        hashes = "".join(self._files[split.file].hash_of_range(split.start, split.stop) for split in splits)
        return hashes and xxhash.xxh3_128_hexdigest(hashes.encode())

    def require_unchanged(self) -> None:
        if self._identity_now is not None and self._identity_now() != self.identify().text:
            raise changed(self.name)

    def read(self, shard: int, skipped: SkippedText) -> Iterator[tuple[int, int, str | None]]:
        for split in self._shards[shard]:
            file = self._files[split.file]
            if self._skip_not_utf8:
                try:
                    for _ in read_split(file, self._column, split):
                        pass
                except NotUTF8Error:
                    skipped.not_utf8.append(file.location)
                    continue

            def on_malformed(location: str, file: InputFile = file) -> None:
                skipped.count_malformed(f"{file.location}: {location}")

            try:
                for number, text in enumerate(read_split(file, self._column, split, on_malformed)):
                    yield split.file, number, text
            except NotUTF8Error:
                self._on_not_utf8()
                raise


def read_split(file: InputFile, column: str, split: Split, on_malformed: OnMalformed = ignore) -> Iterator[str | None]:
    """The documents of a part of a file. Errors name the file and the location in it."""
    count = 0
    try:
        with file.open() as raw:
            if split.start == 0 and split.stop == file.size:
                texts = documents(raw, file.name, column, on_malformed=on_malformed)
            else:
                texts = documents_in_range(raw, file.name, column, split.start, split.stop, on_malformed)
            for text in texts:
                yield text
                count += 1
    except NotUTF8Error as error:
        raise NotUTF8Error(f"{file.location}: {error}{SKIP_HINT}") from None
    except DataError as error:
        raise DataError(f"{file.location}: {error}") from None
    except TorchtrainError:
        raise
    except MISSING as error:
        raise _missing(file.location) from error
    except Exception as error:  # Each format's reader has its own errors for a damaged file.
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            raise OSError(error.errno, error.strerror, file.location) from error
        if isinstance(error, OSError) and error.errno:
            raise unreadable(file.location, error, attempts=1) from error
        raise DataError(f"{file.location} cannot be read after document {count}, it seems damaged: {error}") from error


def changed(name: str) -> DataError:
    """The error about text that has changed while it was tokenized."""
    return DataError(f"{name} changed while it was tokenized: start again when nothing writes to it")


def split_files(sizes: Sequence[int], splittable: Sequence[bool]) -> list[list[Split]]:
    """Divide files of ``sizes`` into shards of about the same size; files that are not splittable stay whole."""
    total = sum(sizes)
    shard_bytes = max(MIN_SHARD_BYTES, min(total // 64, MAX_SHARD_BYTES), -(-total // MAX_SHARDS))
    shards: list[list[Split]] = [[]]
    room = shard_bytes
    for file, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room) if splittable[file] else size
            shards[-1].append(Split(file, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                shards.append([])
                room = shard_bytes
    return [shard for shard in shards if shard]
