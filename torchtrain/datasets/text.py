"""Sources of documents, in units that can be read in any order.

A unit of local data is one document. A unit of streamed data is a file, or a share of one.
"""

import csv
import gzip
import itertools
import math
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import zstandard

from torchtrain.errors import DataError, StorageError, TorchtrainError
from torchtrain.log import logger

# Pauses before each new attempt to read over the network, about four minutes in all.
RETRY_SECONDS = (1, 2, 4, 8, 16, 32, 60, 60, 60)

_DAMAGE = (ValueError, TypeError, LookupError, EOFError, csv.Error, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)


class TextSource(ABC):
    """Documents in units, each of which can be read at any time. ``name`` is for messages.

    ``identity()``: a text that is the same for the same documents alone (``datasets/identity.py``).
    """

    def __init__(self, units: int, name: str, identity: Callable[[], str]):
        self.units = units
        self.name = name
        self.identity = identity
        self.skipped = 0

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


class LocalText(TextSource):
    """Documents with random access: each is a unit.

    Args:
        dataset: one row a document.
        text_of: the document of a row; None if it is not text.
        files: the local files that it was made from, if any.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        text_of: Callable[[Mapping[str, Any]], str | None],
        name: str,
        identity: Callable[[], str],
        files: Sequence[Path] = (),
    ):
        super().__init__(len(dataset), name, identity)
        self.files = files
        self._dataset = dataset
        self._text_of = text_of

    def read(self, unit: int, start: int) -> Iterator[tuple[int, str | None]]:
        if start == 0:
            yield 0, self._text_of(self._dataset[unit])

    def read_all(self, units: range) -> Iterator[str | None]:
        """The documents of ``units``, faster than one by one."""
        for first in range(units.start, units.stop, 256):
            columns = self._dataset[first : min(first + 256, units.stop)]
            for row in zip(*columns.values(), strict=True):
                yield self._text_of(dict(zip(columns, row, strict=True)))


class StreamedText(TextSource):
    """Files that are read over the network as they are needed.

    Its unit is a file. With fewer files than lanes, the documents of each are dealt out among several units; each of
    these reads the whole file and keeps its share.

    Args:
        files: for each file a function that gives its documents from a number on.
        lanes: number of readers.
    """

    def __init__(
        self,
        files: Sequence[Callable[[int], Iterator[str | None]]],
        lanes: int,
        name: str,
        identity: Callable[[], str],
    ):
        self._shares = math.ceil(lanes / len(files))
        super().__init__(len(files) * self._shares, name, identity)
        self._files = files

    def read(self, unit: int, start: int) -> Iterator[tuple[int, str | None]]:
        number, share = divmod(unit, self._shares)
        place = f"file {number} of {len(self._files)}"
        began, resumed = time.monotonic(), start > 0
        start += (share - start) % self._shares
        if resumed:
            logger.info("%s: reading %s up to document %d, where the run goes on", self.name, place, start)
        pauses = iter(RETRY_SECONDS)
        while True:
            try:
                for text in itertools.islice(self._files[number](start), 0, None, self._shares):
                    if resumed:
                        logger.info("%s: reached it after %.1f s", self.name, time.monotonic() - began)
                        resumed = False
                    yield start, text
                    start += self._shares
                    pauses = iter(RETRY_SECONDS)
                return
            except Exception as error:  # The clients of the hub and of HTTP raise dozens of kinds.
                stopped = f"cannot go on reading {self.name} at {place}, document {start}"
                if isinstance(error, TorchtrainError):  # has been tried again
                    raise type(error)(f"{stopped}: {error}") from error
                if isinstance(error, _DAMAGE):  # What cannot be parsed now cannot be parsed later.
                    raise DataError(f"{stopped}: {error!r}") from error
                pause = next(pauses, None)
                if pause is None:
                    raise StorageError(f"{stopped}: {error!r}; start again when the network answers") from error
                logger.error(f"reading {self.name} failed, next attempt in {pause} s: {error!r}")
                time.sleep(pause)
