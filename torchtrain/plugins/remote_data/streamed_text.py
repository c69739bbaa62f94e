"""Text of files that are read over the network as they are needed, and not tokenized before."""

import copy
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import cached_property

import numpy as np

from torchtrain.config.schema import section_of
from torchtrain.datasets.data_identity import FileTable, Identity
from torchtrain.datasets.data_source import (
    DataSource,
    Place,
    SourceContext,
    Stream,
    StreamRequest,
    is_held_out,
    text_bytes,
)
from torchtrain.datasets.file_formats import NotUTF8Error, is_splittable
from torchtrain.datasets.order import permute, stream_seed
from torchtrain.datasets.text_input import SKIP_HINT, InputFile, TextsInMemory
from torchtrain.errors import DataError
from torchtrain.logging import logger
from torchtrain.plugins.remote_data.file_parts import divide_files
from torchtrain.plugins.remote_data.options import RemoteDataConfig
from torchtrain.plugins.remote_data.packed_text import PackedTextStream

SHUFFLED_DOCUMENTS = 128  # which each reader has in memory, to shuffle them
SEARCHED_PARTS = 64  # of which the beginnings are read to find held-out documents
KEPT_SHARE = 1 / 16  # of what is read to find them: the most that is kept


class StreamedText(DataSource):
    """Files that are read over the network as they are needed.

    In each epoch the parts of the files (file_parts.py) are read in another order, and the documents of each are
    shuffled in blocks of ``SHUFFLED_DOCUMENTS``.

    Args:
        files: the files.
        column: the column that contains the text.
        name: for messages.
        context: its tokenizer, global batch size and options.
        identify: returns the identity of the documents.
        skip_not_utf8: read a part up to the first document that is not UTF-8, and count such files.
        held_out: the documents to validate on, if the source has a held-out part (``find_held_out``).
    """

    can_exclude = True

    def __init__(
        self,
        files: Sequence[InputFile],
        column: str,
        name: str,
        context: SourceContext,
        identify: Callable[[], Identity],
        *,
        skip_not_utf8: bool = False,
        held_out: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._files = files
        self._column = column
        self._tokenizer = context.tokenizer
        self._identify = identify
        self._skip_not_utf8 = skip_not_utf8
        self._held_out = held_out
        self._held_out_share = 0.0
        self._streams = section_of(context, RemoteDataConfig).streams
        self.readers = number_of_readers(self._streams, context.global_batch_size)
        self._parts = divide_files(files, self.readers)
        self.parts = len(self._parts)
        self.skipped = 0
        self.malformed = 0
        self.not_utf8: set[str] = set()
        """Locations of the files, found so far, that are not UTF-8."""

    @cached_property
    def _identity(self) -> Identity:
        return self._identify()

    def identity(self) -> str:
        without = f", held out {self._held_out_share:g}" if self._held_out_share else ""
        return self._identity.text + without

    def file_table(self) -> FileTable:
        return self._identity.files

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
        # It imports torch.distributed, which those who list files do not need.
        from torchtrain.datasets.token_cache import tokenize_in_memory

        name = f"{self.name} (held out)"
        return tokenize_in_memory(TextsInMemory(self._held_out, name), self._tokenizer)

    def stream(self, request: StreamRequest) -> Stream:
        readers = number_of_readers(self._streams, request.global_batch_size)
        if readers != self.readers:  # in another stage of the run
            raise DataError(
                f"{self.name} is streamed in {readers} streams with training.global_batch_size = "
                f"{request.global_batch_size}, and in {self.readers} in an earlier stage, whose positions it "
                "continues: set remote_data.streams to a number that divides all batch sizes, or tokenize the data "
                "first (torchtrain.prepare)"
            )
        logger.info(
            "%s: %d file(s) are streamed in %d part(s) by %d reader(s), in another order each epoch; each reader "
            "shuffles blocks of %d documents",
            *(self.name, len(self._files), self.parts, readers, SHUFFLED_DOCUMENTS),
        )
        whole = [part for part in self._parts if not is_splittable(part.file.name, part.file.size) and part.count > 1]
        if whole:
            logger.info(
                "%s: %d file(s) of a format that cannot be read in parts are read as a whole by %d readers each: "
                "tokenize such data first (torchtrain.prepare), or give at least %d files",
                *(self.name, sum(part.number == 0 for part in whole), whole[0].count, readers),
            )
        return PackedTextStream(self, request)

    def read(self, part: int, start: int) -> Generator[tuple[int, str | None], None, None]:
        """Pairs of a document's number in ``part`` and its text, from number ``start`` on.

        The text is None if it is not text, and "" if the document is held out, or the line is blank or malformed.
        """
        of_file, number = self._parts[part], start
        where = of_file.file.location + f", part {of_file.number} of {of_file.count}" * (of_file.count > 1)
        began, resumed = time.monotonic(), start > 0
        if resumed:
            logger.info("%s: reading %s up to document %d, where the run resumes", self.name, where, start)
        try:
            for text in of_file.read(self._column, start, self.count_malformed):
                if resumed:
                    logger.info("%s: reached it after %.1f s", self.name, time.monotonic() - began)
                    resumed = False
                is_left_out = text and self._held_out_share and is_held_out(text, self._held_out_share)
                yield number, "" if is_left_out else text
                number += 1
        except NotUTF8Error as error:
            if not self._skip_not_utf8:
                raise
            self._count_not_utf8(of_file.file.location, error)

    def read_shuffled(self, seed: int, part: int, start: int) -> Iterator[tuple[int, str | None]]:
        # Documents are shuffled in blocks, so that a number in the order is one in a block: a run resumes at any number
        # by reading its block again.
        first = start - start % SHUFFLED_DOCUMENTS
        documents = self.read(part, first)
        while block := [text for _, text in itertools.islice(documents, SHUFFLED_DOCUMENTS)]:
            order = permute(np.arange(len(block)), len(block), stream_seed(seed, first))
            for number in range(max(0, start - first), len(block)):
                yield first + number, block[order[number]]
            first += SHUFFLED_DOCUMENTS

    def place_of(self, seed: int, part: int, number: int) -> Place:
        of_file = self._parts[part]
        first = number - number % SHUFFLED_DOCUMENTS
        length = sum(1 for _ in itertools.islice(self.read(part, first), SHUFFLED_DOCUMENTS))
        document = first + int(permute(np.array([number - first]), length, stream_seed(seed, first))[0])
        return Place(of_file.file.location, of_file.position(document))

    def count_skipped(self) -> None:
        """Count a document that is not text; log the count after the 1st, 2nd, 4th, 8th ..."""
        self.skipped += 1
        if self.skipped.bit_count() == 1:
            logger.info("%s: skipped %d document(s) so far that are empty, null or not text", self.name, self.skipped)

    def count_malformed(self, location: str) -> None:
        """Count a malformed line; log the count and its location after the 1st, 2nd, 4th, 8th ..."""
        self.malformed += 1
        if self.malformed.bit_count() == 1:
            logger.warning("%s: skipped %d malformed line(s) so far: %s", self.name, self.malformed, location)

    def _count_not_utf8(self, location: str, error: NotUTF8Error) -> None:
        if location not in self.not_utf8:
            self.not_utf8.add(location)
            logger.warning(
                "%s: %d of %d file(s) so far are not UTF-8; the rest of the part that is read is skipped: %s",
                *(self.name, len(self.not_utf8), len(self._files), str(error).removesuffix(SKIP_HINT)),
            )


def number_of_readers(most: int, global_batch_size: int) -> int:
    """Number of readers of streamed data: the largest divisor of ``global_batch_size`` up to ``most``."""
    return max(n for n in range(1, min(most, global_batch_size) + 1) if global_batch_size % n == 0)


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
