"""Text of files that are read over the network as they are needed."""

import copy
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from torchtrain.datasets.data_identity import FileTable, Identity
from torchtrain.datasets.data_source import DataSource, Place
from torchtrain.datasets.file_formats import NotUTF8Error, OnMalformed, ignore
from torchtrain.datasets.held_out import is_held_out
from torchtrain.datasets.order import permute, stream_seed
from torchtrain.datasets.packing import TextSource, text_bytes
from torchtrain.datasets.text_sources import LocalText
from torchtrain.errors import DataError, TorchtrainError
from torchtrain.logging import logger

SHUFFLED_DOCUMENTS = 128  # which each reader has in memory, to shuffle them
SHARE_BYTES = 128 << 20  # a file that can be read in shares has one for each such number of bytes
SEARCHED_PARTS = 64  # of which the beginnings are read to find held-out documents
KEPT_SHARE = 1 / 16  # of what is read to find them: the most that is kept


class ReadShare(Protocol):
    """Reads documents of a file."""

    def __call__(self, share: int, shares: int, start: int, on_malformed: OnMalformed, /) -> Iterator[str | None]:
        """The documents of share number ``share`` of ``shares``, from its document ``start`` on.

        ``on_malformed`` is called with the location of each malformed line.
        """
        ...


@dataclass(frozen=True)
class StreamedFile:
    """A file whose documents are streamed."""

    size: int
    """Its size in bytes; 0 if it is divided only where there would be fewer parts than readers."""
    has_shares: bool
    """Whether a share of it can be read without the others. If not, ``read`` is called with one share only."""
    read: ReadShare
    name: str = ""
    """Its URL."""
    position: Callable[[int, int, int], str] | None = None
    """Returns the position in the file of a document, by its share, the number of shares, and its number there."""


class StreamedText(TextSource):
    """Files that are read over the network as they are needed.

    A part is a share of a file: about ``SHARE_BYTES``, or less if there would be fewer parts than readers. In each
    epoch the parts are read in another order, and the documents of each are shuffled in blocks of
    ``SHUFFLED_DOCUMENTS``. A file that cannot be read in shares is read in whole by each of its readers, which keep
    every n-th document.

    Args:
        files: the files.
        readers: number of readers.
        identify: returns the identity of the documents.
        skip_not_utf8: read a part up to the first document that is not UTF-8, and count such files.
        held_out: the documents to validate on, if the source has a held-out part (``find_held_out``).
    """

    one_reader_per_row = False

    def __init__(
        self,
        files: Sequence[StreamedFile],
        readers: int,
        name: str,
        identify: Callable[[], Identity],
        *,
        skip_not_utf8: bool = False,
        held_out: Sequence[str] = (),
    ):
        self._files = files
        self._held_out = held_out
        self._held_out_share = 0.0
        fewest = math.ceil(readers / len(files))
        shares = [max(fewest, -(-file.size // SHARE_BYTES)) if file.has_shares else fewest for file in files]
        largest = max(range(len(files)), key=lambda number: files[number].size)
        if files[largest].has_shares:  # so that all readers end an epoch together
            shares[largest] += -sum(shares) % readers
        self._parts = [(number, share, of) for number, of in enumerate(shares) for share in range(of)]
        super().__init__(len(self._parts), name)
        self._identify = identify
        self._skip_not_utf8 = skip_not_utf8
        logger.info(
            "%s: %d file(s) are streamed in %d part(s) by %d reader(s), in another order each epoch; each reader "
            "shuffles blocks of %d documents",
            *(name, len(files), self.parts, readers, SHUFFLED_DOCUMENTS),
        )
        whole = sum(not file.has_shares for file in files)
        if whole and fewest > 1:
            logger.info(
                "%s: %d file(s) of a format that cannot be read in parts are read as a whole by %d readers each: "
                "prepare such data (torchtrain.prepare), or give at least %d files",
                *(name, whole, fewest, readers),
            )
        self.not_utf8: set[int] = set()
        """Numbers of the files, found so far, that are not UTF-8."""

    @cached_property
    def _identity(self) -> Identity:
        return self._identify()

    def identity(self) -> str:
        without = f", held out {self._held_out_share:g}" if self._held_out_share else ""
        return self._identity.text + without

    def part(self, share: float, *, held_out: bool, section: str) -> DataSource:
        if not held_out:
            rest = copy.copy(self)
            rest._held_out_share = share
            return rest
        if not self._held_out:
            raise DataError(
                f"{section}.held_out = {share:g} holds out none of the documents of {self.name} that were read: raise "
                "it or remote_data.held_out_gib, or set it to 0"
            )
        texts, size = self._held_out, sum(map(text_bytes, self._held_out))
        return LocalText(texts, f"{self.name} (held out)", lambda **_: self._identity, size)

    def file_table(self) -> FileTable:
        return self._identity.files

    def read_in_order_of(self, seed: int, part: int, start: int) -> Iterator[tuple[int, str | None]]:
        # Documents are shuffled in blocks, so that a place in the order is a place in a block: a run resumes at any
        # place by reading its block again.
        first = start - start % SHUFFLED_DOCUMENTS
        documents = self.read(part, first)
        while block := [text for _, text in itertools.islice(documents, SHUFFLED_DOCUMENTS)]:
            order = permute(np.arange(len(block)), len(block), stream_seed(seed, first))
            for place in range(max(0, start - first), len(block)):
                yield first + place, block[order[place]]
            first += SHUFFLED_DOCUMENTS

    def describe(self, seed: int, part: int, number: int) -> Place:
        file_number, share, shares = self._parts[part]
        first = number - number % SHUFFLED_DOCUMENTS
        length = sum(1 for _ in itertools.islice(self.read(part, first), SHUFFLED_DOCUMENTS))
        document = first + int(permute(np.array([number - first]), length, stream_seed(seed, first))[0])
        file = self._files[file_number]
        if not file.has_shares:  # each reader keeps every n-th document
            share, shares, document = 0, 1, share + document * shares
        if file.position is None:
            position = f"document {document}" + f" of part {share} of {shares}" * (shares > 1)
        else:
            position = file.position(share, shares, document)
        return Place(file.name or f"file {file_number} of {self.name}", position)

    def read(self, part: int, start: int) -> Generator[tuple[int, str | None], None, None]:
        number, share, shares = self._parts[part]
        where = f"file {number} of {len(self._files)}" + f", part {share} of {shares}" * (shares > 1)
        began, resumed = time.monotonic(), start > 0
        if resumed:
            logger.info("%s: reading %s up to document %d, where the run resumes", self.name, where, start)
        try:
            for text in self._documents(self._files[number], share, shares, start):
                if resumed:
                    logger.info("%s: reached it after %.1f s", self.name, time.monotonic() - began)
                    resumed = False
                is_left_out = text and self._held_out_share and is_held_out(text, self._held_out_share)
                yield start, "" if is_left_out else text
                start += 1
        except Exception as error:  # Each format's reader has its own errors for a damaged file.
            if self._skip_not_utf8 and isinstance(error, NotUTF8Error):
                self._count_not_utf8(where, number, start, error)
                return
            is_ours = isinstance(error, TorchtrainError)
            kind, reason = (type(error), error) if is_ours else (DataError, repr(error))
            raise kind(f"cannot continue to read {self.name} at {where}, document {start}: {reason}") from error

    def _documents(self, file: StreamedFile, share: int, shares: int, start: int) -> Iterator[str | None]:
        if file.has_shares:
            return file.read(share, shares, start, self.count_malformed)
        on_malformed = ignore if share else self.count_malformed  # all readers of the file read all lines
        return itertools.islice(file.read(0, 1, share + start * shares, on_malformed), 0, None, shares)

    def _count_not_utf8(self, where: str, number: int, document: int, error: NotUTF8Error) -> None:
        if number not in self.not_utf8:
            self.not_utf8.add(number)
            logger.warning(
                "%s: %d of %d file(s) so far are not UTF-8; %s is skipped from document %d on: %s",
                *(self.name, len(self.not_utf8), len(self._files), where, document, error),
            )


def find_held_out(source: StreamedText, share: float, most_bytes: float) -> list[str]:
    """Documents of the held-out ``share`` of a source, which is opened for one reader.

    They are in the beginnings of up to ``SEARCHED_PARTS`` parts, from anywhere in the data, of which ``most_bytes`` of
    text are read, and at most ``KEPT_SHARE`` of that is kept.
    """
    began, found, read_bytes = time.monotonic(), list[str](), 0
    parts = sorted({int(part) for part in np.linspace(0, source.parts - 1, SEARCHED_PARTS)})
    for part in parts:
        of_part = kept = 0
        with closing(source.read(part, 0)) as documents:
            for _, text in documents:
                size = text_bytes(text or "")
                of_part += size
                if text and is_held_out(text, share):
                    found.append(text)
                    kept += size
                if of_part >= most_bytes / len(parts) or kept >= most_bytes / len(parts) * KEPT_SHARE:
                    break
        read_bytes += of_part
    logger.info(
        "%s: found %d held-out document(s) in %.1f MiB of text, in %.1f s (remote_data.held_out_gib)",
        *(source.name, len(found), read_bytes / 2**20, time.monotonic() - began),
    )
    return found
