"""Sources of documents, in units that can be read in any order."""

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import datasets

from torchtrain.datasets.formats import OnMalformed, ignore
from torchtrain.errors import DataError, TorchtrainError
from torchtrain.files import MISSING, with_retries
from torchtrain.logging import logger

T = TypeVar("T")
Documents = Callable[[int, OnMalformed], Iterator[str | None]]

# Pauses before each new attempt to read data, about four minutes in all.
RETRY_SECONDS = (1, 2, 4, 8, 16, 32, 60, 60, 60)


def text_bytes(text: str) -> int:
    """Bytes of ``text`` in UTF-8, a lone surrogate as the one byte that tokenizers read in its place."""
    return len(text.encode("utf-8", "replace"))


def read_again(read: Callable[[], T], path: Path) -> T:
    """``read()`` of a file that was there when the run began; tried again for minutes while the file system fails."""
    try:
        return with_retries(read, path, RETRY_SECONDS)
    except MISSING as error:
        raise DataError(f"{path} was there when the run began, and is not any more: put it back") from error


class TextSource(ABC):
    """Documents in units, each of which can be read at any time. ``name`` is for messages.

    ``identity()``: a text that identifies the documents, whatever their folder and time of writing. Of local files
    above data.verify_gib it hashes parts; with ``whole=True`` all.
    """

    def __init__(self, units: int, name: str, identity: Callable[..., str]):
        self.units = units
        self.name = name
        self.identity = identity
        self.skipped = 0
        self.malformed = 0

    @abstractmethod
    def read(self, unit: int, start: int) -> Iterator[tuple[int, str | None]]:
        """Pairs of a document's number in ``unit`` and the document, from number ``start`` on; None if it is not text.

        Numbers increase, and may have gaps.
        """

    def count_skipped(self) -> None:
        """Count a document that is not text, and say so: the first, the second, the fourth, the eighth ..."""
        self.skipped += 1
        if self.skipped.bit_count() == 1:
            logger.info("%s: skipped %d document(s) so far that are null or not text", self.name, self.skipped)

    def count_malformed(self, place: str) -> None:
        """Count a line that is malformed, and log its place as ``count_skipped`` does."""
        self.malformed += 1
        if self.malformed.bit_count() == 1:
            logger.warning("%s: skipped %d malformed line(s) so far: %s", self.name, self.malformed, place)


class LocalText(TextSource):
    """Documents with random access, in the column "text" of a dataset: each is a unit; None if it is not text.

    ``text_bytes``: size of all documents together, in UTF-8.
    """

    def __init__(self, dataset: datasets.Dataset, name: str, identity: Callable[..., str], text_bytes: int):
        super().__init__(len(dataset), name, identity)
        self._dataset = dataset
        self.text_bytes = text_bytes

    def read(self, unit: int, start: int) -> Iterator[tuple[int, str | None]]:
        if start == 0:
            yield 0, self._dataset[unit]["text"]

    def read_all(self, units: range) -> Iterator[str | None]:
        """The documents of ``units``, faster than one by one."""
        for rows in self._dataset.select(units).iter(256):
            yield from rows["text"]


class StreamedText(TextSource):
    """Files that are read over the network as they are needed.

    Its unit is a file. With fewer files than lanes, the documents of each are dealt out among several units; each of
    these reads the whole file and keeps its share.

    ``files``: for each file a function that gives its documents from a number on, and calls another with the place of
    each malformed line. ``lanes``: number of readers.
    """

    def __init__(self, files: Sequence[Documents], lanes: int, name: str, identity: Callable[..., str]):
        self._shares = math.ceil(lanes / len(files))
        super().__init__(len(files) * self._shares, name, identity)
        self._files = files

    def read(self, unit: int, start: int) -> Iterator[tuple[int, str | None]]:
        number, share = divmod(unit, self._shares)
        place = f"file {number} of {len(self._files)}"
        began, resumed = time.monotonic(), start > 0
        on_malformed = ignore if share else self.count_malformed  # all shares read all lines
        start += (share - start) % self._shares
        if resumed:
            logger.info("%s: reading %s up to document %d, where the run goes on", self.name, place, start)
        try:
            for text in itertools.islice(self._files[number](start, on_malformed), 0, None, self._shares):
                if resumed:
                    logger.info("%s: reached it after %.1f s", self.name, time.monotonic() - began)
                    resumed = False
                yield start, text
                start += self._shares
        except Exception as error:  # Each format's reader has its own errors for a damaged file.
            kind, told = (type(error), error) if isinstance(error, TorchtrainError) else (DataError, repr(error))
            raise kind(f"cannot go on reading {self.name} at {place}, document {start}: {told}") from error
