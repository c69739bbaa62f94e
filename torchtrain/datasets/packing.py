"""Base classes of text sources, and packing of their documents into windows of ``seq_len + 1`` tokens.

A window begins with the last token of the previous window, so that every token is predicted exactly once.
"""

import bisect
import copy
import functools
import itertools
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtrain.datasets.best_fit import Part, pack
from torchtrain.datasets.data_source import (
    Bytes,
    DataSource,
    Piece,
    Place,
    SavedPosition,
    SourceSize,
    State,
    Stream,
    StreamRequest,
    Tokens,
    utf8,
)
from torchtrain.datasets.exclusions import text_hash
from torchtrain.datasets.order import permute, stream_seed
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import DataError
from torchtrain.labels import IGNORE_INDEX
from torchtrain.logging import logger

# Of these, the number of tokens of a source is estimated.
SAMPLED_DOCUMENTS = 16
SAMPLED_CHARACTERS = 2000
# data.packing = "best_fit" packs a group of documents at a time: those that fill so many windows.
GROUP_WINDOWS = 32
SKIPPED_TOKENS = 1 << 20  # that are read at once on the way to a position


def text_bytes(text: str) -> int:
    """Number of bytes of ``text`` in UTF-8."""
    return len(utf8(text))


class TextSource(DataSource):
    """Documents in ``parts`` that can be read independently of each other.

    Args:
        parts: the number of parts.
        name: for messages.

    Raises:
        DataError: there are no parts.
    """

    can_exclude = True
    packings = ("cut", "best_fit")
    one_reader_per_row: ClassVar[bool] = True
    """Whether each row of the batch has a reader of its own. False, for data in few large parts: the parts are divided
    among ``data.streams`` readers; with more readers than parts, some have nothing to read."""

    def __init__(self, parts: int, name: str) -> None:
        if parts == 0:
            raise DataError(f"{name} has no documents")
        self.parts = parts
        self.name = name
        self.skipped = 0
        self.malformed = 0

    @abstractmethod
    def read(self, part: int, start: int) -> Iterator[tuple[int, str | None]]:
        """Pairs of a document's number in ``part`` and its text (None if it is not text), from number ``start`` on.

        Numbers increase, and may have gaps.
        """

    def read_in_order_of(self, seed: int, part: int, start: int) -> Iterator[tuple[int, str | None]]:  # noqa: ARG002
        """As ``read``, in the order of an epoch, which ``seed`` determines; numbers are then places in that order."""
        return self.read(part, start)

    def describe(self, seed: int, part: int, number: int) -> Place:  # noqa: ARG002
        """Where the document is stored that ``read_in_order_of(seed, part, ...)`` pairs with ``number``."""
        return Place(self.name, f"part {part}, document {number}")

    def streams(self, request: StreamRequest) -> list[Stream]:
        readers = request.global_batch_size if self.one_reader_per_row else request.readers
        rows_per_reader = request.global_batch_size // readers
        if request.rows.start % rows_per_reader or request.rows.stop % rows_per_reader:
            raise DataError(
                f"{self.name} is streamed in {readers} streams, the largest divisor of the global batch of "
                f"{request.global_batch_size} up to data.streams; the number of data-parallel ranks must divide it: "
                "raise data.streams, or prepare the data"
            )
        if request.packing == "best_fit" and not request.repeat:
            raise DataError(
                "data.packing = 'best_fit' with data.when_exhausted = 'stop' needs text on a local disk, and "
                f"{self.name} is not: its rows would end at different steps; set one of them to its default"
            )
        stream: type[BestFitStream | PackedTextStream]
        stream = BestFitStream if request.packing == "best_fit" else PackedTextStream
        by_reader: dict[int, Stream] = {
            reader: stream(self, request, reader, readers)
            for reader in range(request.rows.start // rows_per_reader, request.rows.stop // rows_per_reader)
        }
        return [by_reader[row // rows_per_reader] for row in request.rows]

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


class DocumentSource(TextSource):
    """Documents with random access: each part is one document. torchtrain.prepare can tokenize such a source."""

    text_bytes: int | None = None
    """Total size of all documents in UTF-8, if known: torchtrain.prepare then divides them more evenly."""

    @abstractmethod
    def document(self, number: int) -> str | None:
        """Document ``number``, from 0; None if it is not text."""

    def read(self, part: int, start: int) -> Iterator[tuple[int, str | None]]:
        if start == 0:
            yield 0, self.document(part)

    def describe(self, seed: int, part: int, number: int) -> Place:  # noqa: ARG002
        return Place(self.name, f"document {part}")

    def streams(self, request: StreamRequest) -> list[Stream]:
        if request.repeat:
            return super().streams(request)
        if request.sequential:
            return [SequentialTextStream(self, request)] * len(request.rows)
        if request.packing == "best_fit":
            return [DealtBestFitStream(self, request)] * len(request.rows)
        sequence = _Sequence(PackedTextStream(self, request, 0, 1), self.name)
        return [DealtTextStream(sequence, request.seq_len) for _ in request.rows]

    def read_all(self, numbers: range) -> Iterator[str | None]:
        """The documents of ``numbers``; override it if there is a faster way than one by one."""
        return map(self.document, numbers)

    def full_identity(self) -> str:
        """``identity``, with a hash of all data regardless of their size."""
        return self.identity()

    def size(self, tokenizer: Tokenizer) -> SourceSize:
        """The number of tokens is estimated from the beginnings of a few documents."""
        if self.text_bytes is None:
            return SourceSize()
        numbers = sorted({int(number) for number in np.linspace(0, self.parts - 1, SAMPLED_DOCUMENTS)})
        texts = [(self.document(number) or "")[:SAMPLED_CHARACTERS] for number in numbers]
        tokens, size = sum(len(tokenizer.encode(text)) for text in texts), sum(map(text_bytes, texts))
        estimate = round(self.text_bytes * tokens / size) if size else None
        return SourceSize(estimate, self.text_bytes, is_estimate=True)


def byte_shares(tokens: Tokens, token_bytes: npt.NDArray[np.int64], size: int) -> Bytes:
    """Divide ``size``, the number of bytes of a document, among its ``tokens``; the shares add up to ``size``.

    A share is proportional to the number of bytes that the token stands for (``token_bytes``). So the sum is exact even
    if the tokenizer adds a space, normalizes a character or does not know it.
    """
    counted = token_bytes[tokens]
    total = counted.sum()
    return counted * (size / total) if total else np.full(len(tokens), size / len(tokens))


class Share(NamedTuple):
    """Parts that one reader reads one after the other: those of the numbers ``number``, ``number + step``, ... below
    ``end``, of the first one what follows ``token`` in ``document``."""

    number: int
    document: int
    token: int
    step: int
    end: int


_ENDLESS = np.iinfo(np.int64).max


def _shares_of(state: State) -> list[Share]:
    """The shares of a state, without the padding."""
    size = len(Share._fields)
    shares = [Share(*state[start : start + size]) for start in range(0, len(state), size)]
    return [share for share in shares if share.step > 0]


def _require_same_kind(same: bool, name: str) -> None:
    if not same:
        raise DataError(
            f"the saved position in {name} is of other data, of another data.when_exhausted, or of another version of "
            "torchtrain"
        )


@dataclass(frozen=True)
class ReadDocument:
    """A document that a ``PackedTextStream`` has read."""

    tokens: Tokens
    text: str
    place: Callable[[], Place]
    is_excluded: bool

    def piece(self, offset: int, tokens: int) -> Piece:
        """A piece of it."""
        return Piece(self.place(), offset, tokens, text_hash(self.text), self.is_excluded)


class PackedTextStream(Stream):
    """Packs the documents of one reader: for each, bos, its tokens, eos. A token that is both bos and eos occurs once.

    Reader 1 of 2, over a source of 4 parts:

        numbers of parts over all epochs   0 [1] 2 [3]   4 [5] 6 [7]   this reader reads those in brackets
        their numbers in the source        2  0  3  1    1  3  0  2    a permutation for each epoch

    The state is the ``Share`` that is left, here of the step 2. If the number of readers changes, the new ones first
    finish what those before have begun, so that nothing is read twice or left out. Of 3 readers after these 2, which
    were in the parts 6 and 3:

        reader 0   the rest of 6         then 9, 12, 15, ...
        reader 1   the rest of 3, and 5  then 7, 10, 13, ...
        reader 2                              8, 11, 14, ...

    The state is then a sequence of shares, padded with zeros to the same length for each reader.
    """

    def __init__(self, source: TextSource, request: StreamRequest, reader: int, readers: int):
        self._source = source
        self._tokenizer = tokenizer = request.tokenizer
        self._reader = reader
        self._readers = readers
        self._seq_len = request.seq_len
        self._seed = request.seed
        self._repeat = request.repeat
        self._exclude = request.exclude.texts
        self._excluded = 0
        self._token_bytes = np.array(tokenizer.token_bytes)
        self.state = Share(reader, 0, 0, readers, _ENDLESS)

    @property
    def state(self) -> State:
        shares = Share(self._number, self._document, self._token, self._step, self._end), *self._later
        state = tuple(itertools.chain.from_iterable(shares))
        return state + (0,) * (self._state_size - len(state))

    @state.setter
    def state(self, state: State) -> None:
        self._state_size = len(state)
        self._require_size(len(state))
        shares = _shares_of(state)
        _require_same_kind(bool(shares) and min(min(share) for share in shares) >= 0, self._source.name)
        first, *later = shares
        self._number, self._document, self._token, self._step, self._end = first
        self._later = tuple(later)
        number, _, _, step, end = (first, *later)[-1]
        if (number % step, step, end) != (self._reader, self._readers, _ENDLESS):
            raise DataError(
                f"the saved position in {self._source.name} is not one of {self._readers} streams: resume with the "
                "same data.streams and data.download, and with data of the same kind"
            )
        self._documents = self._read_documents()
        self._tokens: Tokens | None = None  # tokens of the current document
        self._bytes: Bytes | None = None  # bytes of these tokens, if requested

    def _require_size(self, size: int) -> None:
        _require_same_kind(size % len(Share._fields) == 0, self._source.name)

    def resume(self, saved: SavedPosition) -> int:
        """Divide what is left among this number of readers."""
        self._require_size(saved.states.shape[1])
        readers = len(saved.states) if self._source.one_reader_per_row else saved.readers
        states = saved.states[:: len(saved.states) // readers]
        shares = states.reshape(readers, -1, len(Share._fields))
        counts = (shares[:, :, Share._fields.index("step")] > 0).sum(axis=1)
        endless = shares[np.arange(readers), counts - 1, Share._fields.index("number")]
        # The parts of streamed data depend on the number of readers.
        same_parts = self._source.one_reader_per_row or readers == self._readers
        if not same_parts or (endless % readers != np.arange(readers)).any():
            raise DataError(
                f"the saved position in {self._source.name} is not one of {self._readers} streams: take a "
                "training.global_batch_size for which data.streams gives as many, or download or prepare the data"
            )
        if readers == self._readers:
            self.state = tuple(states[self._reader].tolist())
        else:
            undivided = int(endless.max()) + 1  # no part from this number on has been begun
            begun_before = undivided if self._repeat else min(undivided, self._source.parts)
            left = [
                share._replace(end=min(share.end, begun_before))
                for before in range(self._reader, readers, self._readers)
                for share in _shares_of(tuple(states[before].tolist()))
                if share.number < begun_before
            ]
            left.append(Share(undivided + (self._reader - undivided) % self._readers, 0, 0, self._readers, _ENDLESS))
            most = int(np.bincount(np.arange(readers) % self._readers, counts).max()) + 1
            padding = (most - len(left)) * len(Share._fields)
            self.state = (*itertools.chain.from_iterable(left), *[0] * padding)
        return -(-saved.windows_drawn * saved.seq_len // self._seq_len)

    def fill(
        self,
        windows: Sequence[Tokens],
        windows_drawn: Sequence[int],  # noqa: ARG002
        sizes: Sequence[Bytes] | None = None,
    ) -> list[int]:
        return [self._fill(window, sizes[i] if sizes else None) for i, window in enumerate(windows)]

    def _fill(self, window: Tokens, sizes: Bytes | None) -> int:
        filled, self._begun_at, self._length = 0, self._number, len(window)
        self._read_fully: set[int] = set()  # parts read from their first document on for this window
        while filled < len(window):
            if self._tokens is None:
                self._tokens, text = next(self._documents, (None, ""))
                if self._tokens is None:
                    return filled
                shares = functools.partial(byte_shares, self._tokens, self._token_bytes)
                self._bytes = None if sizes is None else shares(text_bytes(text))
            part = slice(self._token, self._token + len(window) - filled)
            taken = self._tokens[part]
            window[filled : filled + len(taken)] = taken
            if sizes is not None and self._bytes is not None:
                sizes[filled : filled + len(taken)] = self._bytes[part]
            filled += len(taken)
            self._token += len(taken)
            if filled < len(window):
                self._document, self._token, self._tokens = self._document + 1, 0, None
        self._token -= 1  # the last token is the first input of the next window
        return filled

    def locate(self, windows_drawn: Sequence[int]) -> list[list[Piece]]:
        walker = copy.copy(self)
        walker.state = self.state  # with an iterator of its own, which reads the current document again
        return [walker._locate_next() for _ in windows_drawn]

    def _locate_next(self) -> list[Piece]:
        """The pieces of the next window; moves the position as ``_fill`` does."""
        self._begun_at, self._length, self._read_fully = self._number, self._seq_len + 1, set()
        pieces: list[Piece] = []
        missing = self._length
        while missing:
            if self._tokens is None:
                self._tokens, text = next(self._documents, (None, ""))
                if self._tokens is None:
                    return pieces
                self._hash = text_hash(text)
            taken = min(len(self._tokens) - self._token, missing)
            if taken:
                part, seed = self._part_and_seed()
                place = self._source.describe(seed, part, self._document)
                pieces.append(Piece(place, self._token, taken, self._hash, self._hash in self._exclude))
            missing -= taken
            self._token += taken
            if missing:
                self._document, self._token, self._tokens = self._document + 1, 0, None
        self._token -= 1
        return pieces

    def read_document(self) -> ReadDocument | None:
        """Read the next document, from its first token on; None at the end of data that are not repeated.

        Raises:
            DataError: there is none in all of the source.
        """
        self._begun_at, self._length, self._read_fully = self._number, self._seq_len + 1, set()
        tokens, text = next(self._documents, (None, ""))
        if tokens is None:
            return None
        part, seed = self._part_and_seed()
        place = functools.partial(self._source.describe, seed, part, self._document)
        self._document += 1
        return ReadDocument(tokens, text, place, bool(self._exclude) and text_hash(text) in self._exclude)

    def _count_excluded(self) -> None:
        """Log the number of excluded documents that this reader has met after the 1st, 2nd, 4th, 8th ..."""
        self._excluded += 1
        if self._excluded.bit_count() == 1:
            logger.info("%s: left out %d document(s) of data.exclude so far", self._source.name, self._excluded)

    def _part_and_seed(self) -> tuple[int, int]:
        """The number of the current part in the source, and the seed of the order of its documents."""
        epoch, index = divmod(self._number, self._source.parts)
        part = int(permute(np.array([index]), self._source.parts, stream_seed(self._seed, epoch))[0])
        return part, stream_seed(self._seed, epoch, part)

    def _read_documents(self) -> Iterator[tuple[Tokens, str]]:
        """Tokens and text of each document that has text, from the current position on."""
        parts = self._source.parts
        while self._repeat or self._number < parts:
            # This reader has read each of the parts in full: one epoch more will not fill the window either.
            if len(self._read_fully) == parts:
                raise DataError(
                    f"{self._source.name} has too little text: all of it does not fill one window of "
                    f"training.seq_len + 1 = {self._length} tokens; give more, or lower training.seq_len"
                )
            part, seed = self._part_and_seed()
            if self._number != self._begun_at:
                self._read_fully.add(part)
            for number, text in self._source.read_in_order_of(seed, part, self._document):
                if text is None:
                    self._source.count_skipped()
                elif text:
                    self._document = number
                    tokens = np.array(self._tokenizer.encode(text, bos=True, eos=True), dtype=np.int64)
                    if self._exclude and text_hash(text) in self._exclude:
                        tokens[:] = IGNORE_INDEX
                        self._count_excluded()
                    if len(tokens):  # the tokenizer may not know any character of it
                        yield tokens, text
            self._number, self._document = self._number + self._step, 0
            if self._number >= self._end:
                (self._number, self._document, token, self._step, self._end), *later = self._later
                self._later = tuple(later)
                self._token = token + (token > 0)  # it was the last label of a window
                if self._document or token:
                    self._begun_at = self._number


class BestFitStream(Stream):
    """Packs the documents of one reader, a group at a time; the windows of a group are in a random order.

    What is left of a window is ``IGNORE_INDEX``, and not predicted. The state is the position of the documents before
    the group, their position after it, and the number of windows that have been drawn from it.
    """

    _counts = 1  # numbers after the positions in the state, by which it differs from that of a subclass

    def __init__(self, source: TextSource, request: StreamRequest, reader: int, readers: int) -> None:
        self._documents = PackedTextStream(source, request, reader, readers)
        self._source = source
        self._seq_len = request.seq_len
        self._seed = request.seed
        self._token_bytes = np.array(request.tokenizer.token_bytes)
        self._begin = self._end = self._documents.state
        self._drawn = 0
        self._logs = reader == request.rows.start * readers // request.global_batch_size  # once on each rank
        self._group: list[ReadDocument] = []
        self._windows: list[list[Part]] = []

    @property
    def state(self) -> State:
        return (*self._begin, *self._end, *[0] * (self._counts - 1), self._drawn)

    @state.setter
    def state(self, state: State) -> None:
        if len(state) % (2 * len(Share._fields)) != self._counts or state[-1] < 0:
            raise DataError(
                f"the saved position in {self._source.name} is of another data.packing or data.when_exhausted"
            )
        half = len(state) // 2 - (self._counts - 1)
        self._begin, self._end, self._drawn = state[:half], state[half : 2 * half], state[-1]
        self._windows = []

    def resume(self, saved: SavedPosition) -> int:
        """Continue with the documents after those groups of which windows have been drawn."""
        half = saved.states.shape[1] // 2
        begun = saved.states[:, -1:] > 0
        positions = np.where(begun, saved.states[:, half:-1], saved.states[:, :half])
        windows_drawn = self._documents.resume(
            SavedPosition(positions, saved.windows_drawn, saved.seq_len, saved.readers)
        )
        if begun.any() and self._logs:
            logger.info(
                "%s: with another batch or sequence length, the rest of the open group of %d of %d rows is left out, "
                "each at most %s tokens and the end of a document",
                *(self._source.name, begun.sum(), len(begun), f"{GROUP_WINDOWS * (saved.seq_len + 1):,}"),
            )
        self._begin = self._end = self._documents.state
        self._drawn, self._windows = 0, []
        return windows_drawn

    def fill(
        self, windows: Sequence[Tokens], windows_drawn: Sequence[int], sizes: Sequence[Bytes] | None = None
    ) -> list[int]:
        filled = []
        for number, (window, drawn) in enumerate(zip(windows, windows_drawn, strict=True)):
            window[:], begin = IGNORE_INDEX, 0
            parts = self._window(drawn)
            for part in parts:
                document, of_part = self._group[part.document], slice(part.offset, part.offset + part.tokens)
                window[begin : begin + part.tokens] = document.tokens[of_part]
                if sizes is not None:
                    shares = byte_shares(document.tokens, self._token_bytes, text_bytes(document.text))
                    sizes[number][begin : begin + part.tokens] = shares[of_part]
                begin += part.tokens
            filled.append(len(window) if parts else 0)
        return filled

    def locate(self, windows_drawn: Sequence[int]) -> list[list[Piece]]:
        state, located = self.state, []
        for drawn in windows_drawn:
            pieces = [self._group[part.document].piece(part.offset, part.tokens) for part in self._window(drawn)]
            located.append(pieces)
        self.state = state
        return located

    def _window(self, drawn: int) -> list[Part]:  # noqa: ARG002
        """The parts of the next window, before which the source has returned ``drawn`` for all rows; none at the end of
        the data."""
        if not self._windows:
            self._read_group()
        if self._drawn == len(self._windows):
            self._begin, self._drawn = self._end, 0
            self._read_group()
        _require_same_kind(self._drawn < len(self._windows), self._source.name)
        self._drawn += 1
        return self._windows[self._drawn - 1]

    def _read_group(self) -> None:
        if self._documents.state != self._begin:  # else its open file would be read again
            self._documents.state = self._begin
        self._group, tokens = [], 0
        while tokens < GROUP_WINDOWS * (self._seq_len + 1):
            document = self._documents.read_document()
            if document is None:
                break
            self._group.append(document)
            tokens += len(document.tokens)
        self._end = self._documents.state
        packed = pack([len(document.tokens) for document in self._group], self._seq_len)
        order = permute(np.arange(len(packed)), len(packed), stream_seed(self._seed, *self._begin))
        self._windows = [packed[number] for number in order]


class DealtBestFitStream(BestFitStream):
    """As ``BestFitStream``, of one sequence of all documents. All rows in turn take its next window, as those of
    ``DealtTextStream`` do, so that the rows of a rank share it. Its state has the windows drawn before the group.
    """

    _counts = 2

    def __init__(self, source: DocumentSource, request: StreamRequest) -> None:
        super().__init__(source, request, 0, 1)
        self._logs = request.rows.start == 0

    def resume(self, saved: SavedPosition) -> int:
        self.state = tuple(saved.states[saved.states[:, -1].argmax()].tolist())
        if saved.seq_len == self._seq_len:
            return saved.windows_drawn
        if saved.windows_drawn > self._drawn:
            self._begin = self._end
            if self._logs:
                logger.info(
                    "%s: with another training.seq_len, the rest of the open group is left out, at most %s tokens and "
                    "the end of a document",
                    *(self._source.name, f"{GROUP_WINDOWS * (saved.seq_len + 1):,}"),
                )
        self._drawn = -(-saved.windows_drawn * saved.seq_len // self._seq_len)
        return self._drawn

    def _window(self, drawn: int) -> list[Part]:
        if not self._windows:
            self._read_group()
        while self._windows and drawn >= self._drawn + len(self._windows):
            self._begin, self._drawn = self._end, self._drawn + len(self._windows)
            self._read_group()
        _require_same_kind(drawn >= self._drawn or not self._windows, self._source.name)
        return self._windows[drawn - self._drawn] if self._windows else []


class _Sequence:
    """All documents one after the other, which the rows of a rank read together."""

    def __init__(self, documents: PackedTextStream, name: str) -> None:
        self.documents = documents
        self.name = name
        self.tokens = 0
        """Number of tokens before the position of ``documents``."""

    def seek(self, tokens: int, state: State, tokens_before: int, *, count_bytes: bool) -> None:
        """Go to where ``tokens`` tokens are before: from here or, if that is not on the way, from ``state``."""
        if not tokens_before <= self.tokens <= tokens:
            self.documents.state, self.tokens = state, tokens_before
        left = tokens - self.tokens
        _require_same_kind(0 <= left < _ENDLESS // 2, self.name)
        has_more = True
        while has_more:  # the state may be damaged, and name any number of tokens
            count = min(left, SKIPPED_TOKENS)
            skipped = np.empty(count + 1, dtype=np.int64)
            # The bytes of a document are counted when it is read.
            (filled,) = self.documents.fill([skipped], [0], [np.empty(len(skipped))] if count_bytes else None)
            left -= count
            has_more = left > 0 and filled == len(skipped)
        self.tokens = tokens


class DealtTextStream(Stream):
    """The windows of one row, where all rows in turn take the next window of one sequence of all documents.

    So all rows end together, and only what does not fill the last batch is left. The price is that each rank tokenizes
    all documents, also those of other ranks' rows.

    The state is that of the sequence before the last window of this row, the number of tokens before that window, and
    the number of tokens before the first window, which is not 0 after a change of the sequence length.
    """

    def __init__(self, sequence: _Sequence, seq_len: int) -> None:
        self._sequence = sequence
        self._seq_len = seq_len
        self._state = (*sequence.documents.state, 0, 0)

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        _require_same_kind(len(state) == len(self._state), self._sequence.name)
        self._state = state

    def resume(self, saved: SavedPosition) -> int:
        """Continue with the token after the windows that were drawn."""
        _require_same_kind(saved.states.shape[1] == len(self._state), self._sequence.name)
        *position, before, first = saved.states[saved.states[:, -2].argmax()].tolist()
        windows_drawn = -(-saved.windows_drawn * saved.seq_len // self._seq_len)
        first += saved.windows_drawn * saved.seq_len - windows_drawn * self._seq_len
        self.state = (*position, before, first)
        return windows_drawn

    def _go_to(self, window: int, *, count_bytes: bool) -> PackedTextStream:
        """The sequence, at the beginning of the window of this number."""
        *position, before, first = self._state
        start = first + window * self._seq_len
        self._sequence.seek(start, tuple(position), before, count_bytes=count_bytes)
        self._state = (*self._sequence.documents.state, start, first)
        return self._sequence.documents

    def fill(
        self, windows: Sequence[Tokens], windows_drawn: Sequence[int], sizes: Sequence[Bytes] | None = None
    ) -> list[int]:
        filled = []
        for number, (window, drawn) in enumerate(zip(windows, windows_drawn, strict=True)):
            documents = self._go_to(drawn, count_bytes=sizes is not None)
            filled += documents.fill([window], [drawn], None if sizes is None else [sizes[number]])
            self._sequence.tokens += self._seq_len
        return filled

    def locate(self, windows_drawn: Sequence[int]) -> list[list[Piece]]:
        state = self._state
        pieces = [piece for drawn in windows_drawn for piece in self._go_to(drawn, count_bytes=False).locate([drawn])]
        self._state = state
        return pieces


class SequentialTextStream(Stream):
    """Windows of all documents one after the other, in a random order, each packed as by ``PackedTextStream``.

    A window depends only on the number of windows drawn before it: so all rows share one stream, and its state is
    empty. Each rank reads all documents up to the last window that it needs, and keeps their lengths: when the data are
    read again, as in each validation, it reads only the documents of its own windows.
    """

    def __init__(self, source: DocumentSource, request: StreamRequest) -> None:
        self.state: State = ()
        self._source = source
        self._tokenizer = request.tokenizer
        self._token_bytes = np.array(request.tokenizer.token_bytes)
        self._seq_len = request.seq_len
        self._order = permute(np.arange(source.parts), source.parts, stream_seed(request.seed))
        self._ends = array("q")  # the number of tokens up to the end of each document, as far as they have been read
        self._document = functools.lru_cache(4)(self._read)

    def fill(
        self, windows: Sequence[Tokens], windows_drawn: Sequence[int], sizes: Sequence[Bytes] | None = None
    ) -> list[int]:
        starts = [drawn * self._seq_len for drawn in windows_drawn]
        return [
            self._fill(window, start, sizes[number] if sizes else None)
            for number, (window, start) in enumerate(zip(windows, starts, strict=True))
        ]

    def _fill(self, window: Tokens, start: int, sizes: Bytes | None) -> int:
        filled, place = 0, bisect.bisect_right(self._ends, start)
        while filled < len(window) and place < len(self._order):
            tokens, shares = self._document(place)
            if place == len(self._ends):
                self._ends.append((self._ends[-1] if place else 0) + len(tokens))
            offset = start + filled - (self._ends[place - 1] if place else 0)
            taken = tokens[offset : offset + len(window) - filled]
            window[filled : filled + len(taken)] = taken
            if sizes is not None:
                sizes[filled : filled + len(taken)] = shares[offset : offset + len(taken)]
            filled += len(taken)
            place = bisect.bisect_right(self._ends, start + filled)  # documents that are known to be empty are skipped
        return filled

    def _read(self, place: int) -> tuple[Tokens, Bytes]:
        """Tokens of the document at a place of the order, and the number of bytes of text that each stands for."""
        text = self._source.document(int(self._order[place]))
        if text is None and place == len(self._ends):
            self._source.count_skipped()
        tokens = np.array(self._tokenizer.encode(text, bos=True, eos=True) if text else [], dtype=np.int64)
        return tokens, byte_shares(tokens, self._token_bytes, text_bytes(text)) if text and len(tokens) else np.zeros(0)
