"""Text of files that are read over the network as they are needed."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from torchtrain.datasets.data_identity import FileTable, Identity
from torchtrain.datasets.file_formats import NotUTF8Error, OnMalformed, ignore
from torchtrain.datasets.order import permute, stream_seed
from torchtrain.datasets.packing import TextSource
from torchtrain.errors import DataError, TorchtrainError
from torchtrain.logging import logger

Documents = Callable[[int, OnMalformed], Iterator[str | None]]
SHUFFLED_DOCUMENTS = 128  # which each reader has in memory, to shuffle them


class StreamedText(TextSource):
    """Files that are read over the network as they are needed.

    In each epoch the files are read in another order, and the documents of each are shuffled in blocks of
    ``SHUFFLED_DOCUMENTS``. A part is a file. With fewer files than readers, the documents of each file are divided
    among several parts, each of which reads the whole file and keeps its share.

    Args:
        files: for each file a function that returns its documents from a given number on. Its second argument is called
            with the location of each malformed line.
        readers: number of readers.
        identify: returns the identity of the documents.
        skip_not_utf8: read a file up to the first document that is not UTF-8, and count such files.
    """

    one_reader_per_row = False

    def __init__(
        self,
        files: Sequence[Documents],
        readers: int,
        name: str,
        identify: Callable[[], Identity],
        *,
        skip_not_utf8: bool = False,
    ):
        self._shares = math.ceil(readers / len(files))
        super().__init__(len(files) * self._shares, name)
        self._read_files = files
        self._identify = identify
        self._skip_not_utf8 = skip_not_utf8
        logger.info(
            "%s: %d file(s) are streamed by %d reader(s); each shuffles blocks of %d documents",
            *(name, len(files), readers, SHUFFLED_DOCUMENTS),
        )
        self.not_utf8: set[int] = set()
        """Numbers of the files, found so far, that are not UTF-8."""

    @cached_property
    def _identity(self) -> Identity:
        return self._identify()

    def identity(self) -> str:
        return self._identity.text

    def file_table(self) -> FileTable:
        return self._identity.files

    def read_in_order_of(self, seed: int, part: int, start: int) -> Iterator[tuple[int, str | None]]:
        # Documents are shuffled in blocks, so that a place in the order is a place in a block: a run resumes at any
        # place by reading its block again.
        first = start - start % SHUFFLED_DOCUMENTS
        documents = self.read(part, first * self._shares)
        while block := [text for _, text in itertools.islice(documents, SHUFFLED_DOCUMENTS)]:
            order = permute(np.arange(len(block)), len(block), stream_seed(seed, first))
            for place in range(max(0, start - first), len(block)):
                yield first + place, block[order[place]]
            first += SHUFFLED_DOCUMENTS

    def read(self, part: int, start: int) -> Iterator[tuple[int, str | None]]:
        number, share = divmod(part, self._shares)
        file = f"file {number} of {len(self._read_files)}"
        began, resumed = time.monotonic(), start > 0
        on_malformed = ignore if share else self.count_malformed  # all shares read all lines
        start += (share - start) % self._shares
        if resumed:
            logger.info("%s: reading %s up to document %d, where the run resumes", self.name, file, start)
        try:
            for text in itertools.islice(self._read_files[number](start, on_malformed), 0, None, self._shares):
                if resumed:
                    logger.info("%s: reached it after %.1f s", self.name, time.monotonic() - began)
                    resumed = False
                yield start, text
                start += self._shares
        except Exception as error:  # Each format's reader has its own errors for a damaged file.
            if self._skip_not_utf8 and isinstance(error, NotUTF8Error):
                self._count_not_utf8(number, start, error)
                return
            is_ours = isinstance(error, TorchtrainError)
            kind, reason = (type(error), error) if is_ours else (DataError, repr(error))
            raise kind(f"cannot continue to read {self.name} at {file}, document {start}: {reason}") from error

    def _count_not_utf8(self, number: int, document: int, error: NotUTF8Error) -> None:
        if number not in self.not_utf8:
            self.not_utf8.add(number)
            logger.warning(
                "%s: %d of %d file(s) so far are not UTF-8; file %d is skipped from document %d on: %s",
                *(self.name, len(self.not_utf8), len(self._read_files), number, document, error),
            )
