"""Input of torchtrain.prepare, divided into shards that processes read independently of each other.

The division depends on names and sizes of files alone (or on the number of documents of other sources), so that any
number of processes on any number of machines writes the same shards. Files are read directly, without a converted copy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import xxhash

from torchtrain.datasets.data_identity import Identity
from torchtrain.datasets.file_formats import (
    NotUTF8Error,
    OnMalformed,
    Reader,
    documents_in_range,
    ignore,
    is_splittable,
)
from torchtrain.datasets.held_out import is_held_out
from torchtrain.datasets.local_files import documents_of
from torchtrain.datasets.packing import DocumentSource
from torchtrain.datasets.text_sources import read_with_retries
from torchtrain.errors import DataError
from torchtrain.files import hash_of
from torchtrain.plugins.remote_data.remote_files import RemoteFile, documents_of_remote

MIN_SHARD_BYTES = 1 << 18  # minimum size of the text of a shard
MAX_SHARD_BYTES = 1 << 26  # of the input of a shard; of more than 1 TiB of input, shards are larger
MAX_SHARDS = 1 << 14


@dataclass
class InputCounts:
    """What was skipped while a shard was read."""

    malformed: int = 0
    """Malformed lines."""
    first_malformed: str = ""
    """File and location of the first malformed line."""
    not_utf8: list[str] = field(default_factory=list)
    """Files that are not UTF-8."""

    def count_malformed(self, location: str) -> None:
        self.malformed += 1
        self.first_malformed = self.first_malformed or location


class ShardedInput(ABC):
    """Documents divided into shards."""

    name: str
    """Name for messages."""
    shard_sizes: list[int]
    """Size of each shard in bytes, or in documents: for the progress."""
    file_count = 0
    """Number of files, if the input is files."""

    @abstractmethod
    def identity(self) -> str:
        """A text that identifies the content of the input."""

    @abstractmethod
    def read(self, shard: int, counts: InputCounts) -> Iterator[str | None]:
        """The documents of a shard in their order; None for a document that is not text."""

    def content_hash(self, shard: int) -> str:  # noqa: ARG002
        """A hash of the input of a shard; "" if ``identity`` contains one of all content.

        Raises:
            DataError: the input has changed since it was opened.
        """
        return ""

    def require_unchanged(self) -> None:  # noqa: B027
        """Raise DataError if files whose content is part of ``identity`` have changed since they were opened."""


class ShardedDocuments(ShardedInput):
    """A source with random access to its documents.

    Args:
        source: the source.
        files: its files, if they are read in place.
    """

    def __init__(self, source: DocumentSource, files: Sequence["LocalInputFile"] = ()) -> None:
        self._source = source
        self._files = files
        self.name = source.name
        self._shards = split_documents(source.parts, source.text_bytes)
        self.shard_sizes = [len(numbers) for numbers in self._shards]

    def identity(self) -> str:
        return self._source.full_identity()

    def read(self, shard: int, counts: InputCounts) -> Iterator[str | None]:  # noqa: ARG002
        return self._source.read_all(self._shards[shard])

    def require_unchanged(self) -> None:
        for file in self._files:
            file.require_unchanged()


@dataclass(frozen=True)
class Split:
    """The part of a file whose first byte is in ``range(start, stop)``, by lines or row groups."""

    file: int
    start: int
    stop: int


class InputFile(ABC):
    """A file of the input."""

    name: str
    """Its name, which determines its format."""
    location: str
    """Path or URL."""
    size: int

    @abstractmethod
    def documents(self, column: str, on_malformed: OnMalformed, read: Reader | None) -> Iterator[str | None]:
        """All documents, or those that ``read`` returns."""

    def hash_of_range(self, start: int, stop: int) -> str:  # noqa: ARG002
        """Hash of the bytes in ``range(start, stop)``; "" if the identity of the files contains one of all content.

        Raises:
            DataError: the file has changed since it was opened.
        """
        return ""


class LocalInputFile(InputFile):
    def __init__(self, path: Path) -> None:
        self._path = path
        self.name, self.location = path.name, str(path)
        self.size, self._modified = self._stat()

    def _stat(self) -> tuple[int, int]:
        stat = self._path.stat()
        return stat.st_size, stat.st_mtime_ns

    def documents(self, column: str, on_malformed: OnMalformed, read: Reader | None) -> Iterator[str | None]:
        return documents_of(self._path, column, on_malformed, read)

    def hash_of_range(self, start: int, stop: int) -> str:
        digest = read_with_retries(partial(hash_of, self._path, start, stop - start), self._path)
        self.require_unchanged()
        return digest

    def require_unchanged(self) -> None:
        """Raise DataError if the size or time of the file has changed since it was opened."""
        if read_with_retries(self._stat, self._path) != (self.size, self._modified):
            raise _changed(str(self._path))


class RemoteInputFile(InputFile):
    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self.name, self.location, self.size = file.name, file.url, file.size

    def documents(self, column: str, on_malformed: OnMalformed, read: Reader | None) -> Iterator[str | None]:
        return documents_of_remote(self._file, column, on_malformed, read)


class ShardedFiles(ShardedInput):
    """Files that are parsed when they are read, such as JSON lines or Parquet.

    Args:
        files: the files in their order.
        column: the column that contains the text.
        name: name for messages.
        identify: returns the identity of the files.
        identity_now: returns the text of the identity of what is found now, which is compared after all is read; None:
            each file is compared after it is read (``hash_of_range``).
        skip_not_utf8: skip and count files that are not UTF-8. They must be read twice, and are not split.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        column: str,
        name: str,
        identify: Callable[[], Identity],
        identity_now: Callable[[], str] | None = None,
        *,
        skip_not_utf8: bool,
    ) -> None:
        self.name = name
        self._files = files
        self.file_count = len(files)
        self._column = column
        self._identify = identify
        self._identity_now = identity_now
        self._skip_not_utf8 = skip_not_utf8
        splittable = [is_splittable(file.name) and not skip_not_utf8 for file in files]
        self._shards = split_files([file.size for file in files], splittable)
        self.shard_sizes = [sum(split.stop - split.start for split in shard) for shard in self._shards]

    def identity(self) -> str:
        return self._identify().text

    def content_hash(self, shard: int) -> str:
        splits = self._shards[shard]
        hashes = "".join(self._files[split.file].hash_of_range(split.start, split.stop) for split in splits)
        return hashes and xxhash.xxh3_128_hexdigest(hashes.encode())

    def require_unchanged(self) -> None:
        if self._identity_now is not None and self._identity_now() != self.identity():
            raise _changed(self.name)

    def read(self, shard: int, counts: InputCounts) -> Iterator[str | None]:
        for split in self._shards[shard]:
            file = self._files[split.file]
            if self._skip_not_utf8:
                try:
                    for _ in file.documents(self._column, ignore, None):
                        pass
                except NotUTF8Error:
                    counts.not_utf8.append(file.location)
                    continue
            whole = split.start == 0 and split.stop == file.size
            read = None if whole else _range_reader(file.name, self._column, split)

            def on_malformed(location: str, file: InputFile = file) -> None:
                counts.count_malformed(f"{file.location}: {location}")

            yield from file.documents(self._column, on_malformed, read)


class ShardedPart(ShardedInput):
    """The documents of an input that ``SourceConfig.held_out`` holds out, or the others.

    Args:
        whole: the input.
        identity: that of the input.
        share: the share of the documents that is held out.
        held_out: whether these are the held-out ones.
    """

    def __init__(self, whole: ShardedInput, identity: str, share: float, *, held_out: bool) -> None:
        self._whole, self._share, self._held_out = whole, share, held_out
        self._identity = f"held-out {share:g} of {identity}" if held_out else identity
        self.name = f"the held-out {share:g} of {whole.name}" if held_out else whole.name
        self.shard_sizes, self.file_count = whole.shard_sizes, whole.file_count

    def identity(self) -> str:
        return self._identity

    def read(self, shard: int, counts: InputCounts) -> Iterator[str | None]:
        for text in self._whole.read(shard, InputCounts() if self._held_out else counts):
            if not text:
                yield "" if self._held_out else text  # so that it is counted once
            else:
                yield text if is_held_out(text, self._share) == self._held_out else ""

    def content_hash(self, shard: int) -> str:
        return self._whole.content_hash(shard)

    def require_unchanged(self) -> None:
        self._whole.require_unchanged()


def _changed(name: str) -> DataError:
    return DataError(
        f"{name} changed while it was prepared: start again with an empty prepare.output when nothing writes to it"
    )


def _range_reader(name: str, column: str, split: Split) -> Reader:
    def read(raw: BinaryIO, on_malformed: OnMalformed) -> Iterator[str | None]:
        return documents_in_range(raw, name, column, split.start, split.stop, on_malformed)

    return read


def split_documents(documents: int, text_bytes: int | None) -> list[range]:
    """Numbers of the documents of each shard: enough shards for many cores, and not too many files for little data."""
    largest = documents if text_bytes is None else max(1, text_bytes // MIN_SHARD_BYTES)
    count = min(documents, largest, max(64, min(4096, documents // 1024)))
    borders = [documents * number // count for number in range(count + 1)]
    return [range(borders[number], borders[number + 1]) for number in range(count)]


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
