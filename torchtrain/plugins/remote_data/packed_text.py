"""Packing of streamed documents into windows of ``seq_len + 1`` tokens.

A window begins with the last token of its reader's previous window, so that every token is predicted exactly once.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchtrain.datasets.data_source import (
    Bytes,
    Piece,
    Place,
    SavedPosition,
    State,
    Stream,
    StreamRequest,
    Tokens,
    text_bytes,
    text_hash,
)
from torchtrain.datasets.order import permute, stream_seed
from torchtrain.errors import DataError
from torchtrain.labels import IGNORE_INDEX
from torchtrain.logging import logger

MAX_NUMBER = 2**53  # in a saved position


class TextParts(Protocol):
    """Documents in ``parts`` that can be read independently of each other."""

    name: str
    readers: int
    """Number of readers, which divides the global batch size."""
    parts: int

    def read_shuffled(self, seed: int, part: int, start: int) -> Iterator[tuple[int, str | None]]:
        """The documents of a part in an order that ``seed`` determines, from number ``start`` of that order on.

        Each with its number; None is a document that is not text, and "" one that is left out.
        """
        ...

    def place_of(self, seed: int, part: int, number: int) -> Place:
        """Where the document is stored that ``read_shuffled(seed, part, ...)`` pairs with ``number``."""
        ...

    def count_skipped(self) -> None:
        """Called for each document that is not text."""


@dataclass
class _Document:
    """A document that a reader has read."""

    part: int
    seed: int
    number: int
    """Its number in the order of its part by ``seed``."""
    text: str
    tokens: Tokens
    token_bytes: npt.NDArray[np.int64]
    """Of each token of the vocabulary."""
    is_excluded: bool

    @cached_property
    def byte_shares(self) -> Bytes:
        return byte_shares(self.tokens, self.token_bytes, text_bytes(self.text))


def byte_shares(tokens: Tokens, token_bytes: npt.NDArray[np.int64], size: int) -> Bytes:
    """Divide ``size``, the number of bytes of a document, among its ``tokens``; the shares add up to ``size``.

    A share is proportional to the number of bytes that the token stands for (``token_bytes``). So the sum is exact even
    if the tokenizer adds a space, normalizes a character or does not know it.
    """
    counted = token_bytes[tokens]
    total = counted.sum()
    return counted * (size / total) if total else np.full(len(tokens), size / len(tokens))


class _Reader:
    """Packs documents one after the other, each as bos, its tokens, eos. A token that is both bos and eos occurs once.

    Reader 1 of 2, over a source of 4 parts:

        numbers of parts over all epochs   0 [1] 2 [3]   4 [5] 6 [7]   this reader reads those in brackets
        their numbers in the source        2  0  3  1    1  3  0  2    a permutation for each epoch
    """

    def __init__(self, source: TextParts, request: StreamRequest, number: int) -> None:
        self._source = source
        self._request = request
        self._token_bytes = np.array(request.tokenizer.token_bytes)
        self._excluded = 0
        self.position = number, 0, 0

    @property
    def position(self) -> tuple[int, int, int]:
        """Where the next window begins: number of the part over all epochs, number of the document in the order of that
        part, and number of the token in that document."""
        return self._part, self._number, self._token

    @position.setter
    def position(self, position: tuple[int, int, int]) -> None:
        self._part, self._number, self._token = position
        self._documents = self._read_documents()
        self._document: _Document | None = None  # the one at the position, if it has been read

    def next_window(self, length: int) -> list[tuple[_Document, slice]]:
        """The documents of the next window, each with the tokens of it that are in the window.

        Together they have ``length`` tokens, and fewer only at the end of data that are not repeated.
        """
        self._first_part, self._length = self._part, length
        self._read_fully = set[int]()  # parts that are read from their first document on for this window
        pieces, missing = list[tuple[_Document, slice]](), length
        while True:
            if self._document is None:
                self._document = next(self._documents, None)
                if self._document is None:
                    return pieces
            end = min(self._token + missing, max(self._token, len(self._document.tokens)))  # it may be damaged
            pieces.append((self._document, slice(self._token, end)))
            missing -= end - self._token
            self._token = end
            if not missing:
                self._token -= 1  # the last token is the first input of the next window
                return pieces
            self._number, self._token, self._document = self._number + 1, 0, None

    def _read_documents(self) -> Iterator[_Document]:
        """The documents that have tokens, from the current position on."""
        source, request = self._source, self._request
        while request.repeat or self._part < source.parts:
            # This reader has read each of the parts in full: one epoch more will not fill the window either.
            if len(self._read_fully) == source.parts:
                raise DataError(
                    f"{source.name} has too little text: all of it does not fill one window of "
                    f"training.seq_len + 1 = {self._length} tokens; give more, or lower training.seq_len"
                )
            epoch, index = divmod(self._part, source.parts)
            part = int(permute(np.array([index]), source.parts, stream_seed(request.seed, epoch))[0])
            seed = stream_seed(request.seed, epoch, part)
            if self._part != self._first_part:
                self._read_fully.add(part)
            for number, text in source.read_shuffled(seed, part, self._number):
                if text is None:
                    source.count_skipped()
                elif text:
                    tokens = np.array(request.tokenizer.encode(text, bos=True, eos=True), dtype=np.int64)
                    if len(tokens):  # the tokenizer may not know any character of it
                        self._number = number
                        is_excluded = bool(request.exclude.texts) and text_hash(text) in request.exclude.texts
                        self._count_excluded(is_excluded)
                        yield _Document(part, seed, number, text, tokens, self._token_bytes, is_excluded)
            self._part, self._number = self._part + source.readers, 0

    def _count_excluded(self, is_excluded: bool) -> None:
        """Log the number of excluded documents that this reader has read after the 1st, 2nd, 4th, 8th ..."""
        self._excluded += is_excluded
        if is_excluded and self._excluded.bit_count() == 1:
            logger.info("%s: left out %d document(s) of data.exclude so far", self._source.name, self._excluded)

    def copy(self) -> "_Reader":
        """A reader at the same position, which reads the current document again."""
        other = copy.copy(self)
        other.position = self.position
        return other


class PackedTextStream(Stream):
    """The windows of the readers of this rank, each of which fills consecutive rows of the global batch.

    The state of a row is the position of its reader, and the number of all readers.
    """

    def __init__(self, source: TextParts, request: StreamRequest) -> None:
        self._source = source
        self._request = request
        self._rows_per_reader = rows_per_reader = request.global_batch_size // source.readers
        if request.rows.start % rows_per_reader or request.rows.stop % rows_per_reader:
            raise DataError(
                f"{source.name} is streamed in {source.readers} streams, the largest divisor of the global batch of "
                f"{request.global_batch_size} up to remote_data.streams; the number of data-parallel ranks must divide "
                "it: raise remote_data.streams, or tokenize the data first (torchtrain.prepare)"
            )
        self._numbers = range(request.rows.start // rows_per_reader, request.rows.stop // rows_per_reader)
        self._readers = [_Reader(source, request, number) for number in self._numbers]

    @property
    def state(self) -> State:
        positions = [(*reader.position, self._source.readers) for reader in self._readers]
        return np.repeat(np.array(positions, dtype=np.int64), self._rows_per_reader, axis=0)

    @state.setter
    def state(self, state: State) -> None:
        self._require_columns(state)
        positions = state[:: self._rows_per_reader]
        readers = self._source.readers
        if (positions[:, 3] != readers).any() or (positions[:, 0] % readers != np.array(self._numbers)).any():
            raise self._of_other_readers()
        for reader, (part, number, token, _) in zip(self._readers, positions.tolist(), strict=True):
            reader.position = part, number, token

    def _require_columns(self, state: State) -> None:
        if state.shape[1] != 4 or state.min() < 0 or state.max() > MAX_NUMBER:
            raise DataError(
                f"the saved position in {self._source.name} is of other data, or of another version of torchtrain"
            )

    def _of_other_readers(self) -> DataError:
        return DataError(
            f"the saved position in {self._source.name} is not one of {self._source.readers} streams: resume with the "
            "same remote_data.streams, and a training.global_batch_size for which it gives as many, or tokenize the "
            "data before training (torchtrain.prepare)"
        )

    def resume(self, saved: SavedPosition) -> int:
        """Continue each reader with its next token."""
        self._require_columns(saved.states)
        readers = self._source.readers
        if (saved.states[:, 3] != readers).any():  # the parts of the data depend on it
            raise self._of_other_readers()
        of_readers = saved.states[:: len(saved.states) // readers]
        self.state = np.repeat(of_readers[self._numbers.start : self._numbers.stop], self._rows_per_reader, axis=0)
        return -(-saved.windows_drawn * saved.seq_len // self._request.seq_len)

    def fill(
        self,
        rows: Sequence[int],
        windows: Sequence[Tokens],
        windows_drawn: Sequence[int],  # noqa: ARG002
        sizes: Sequence[Bytes] | None = None,
    ) -> list[int]:
        filled = []
        for index, (row, window) in enumerate(zip(rows, windows, strict=True)):
            begin = 0
            for document, tokens in self._readers[row // self._rows_per_reader].next_window(len(window)):
                end = begin + tokens.stop - tokens.start
                window[begin:end] = IGNORE_INDEX if document.is_excluded else document.tokens[tokens]
                if sizes is not None:
                    sizes[index][begin:end] = document.byte_shares[tokens]
                begin = end
            filled.append(begin)
        return filled

    def locate(self, rows: Sequence[int], windows_drawn: Sequence[int]) -> list[list[Piece]]:  # noqa: ARG002
        readers = [reader.copy() for reader in self._readers]
        windows = (readers[row // self._rows_per_reader].next_window(self._request.seq_len + 1) for row in rows)
        return [[self._piece(*piece) for piece in window] for window in windows]

    def _piece(self, document: _Document, tokens: slice) -> Piece:
        place = self._source.place_of(document.seed, document.part, document.number)
        size = tokens.stop - tokens.start
        return Piece(place, tokens.start, size, text_hash(document.text), document.is_excluded)
