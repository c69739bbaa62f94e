"""Packing of documents into windows so that few are cut: ``data.packing = "best_fit"``.

By "Fewer Truncations Improve Language Modeling" (Ding et al. 2024, https://arxiv.org/abs/2404.10830), with groups of
documents, so that a stream packs what it has read and its position stays a few numbers.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtrain.datasets.data_source import Bytes, Piece, SavedPosition, State, Stream, StreamRequest, Tokens
from torchtrain.datasets.order import permute, stream_seed
from torchtrain.datasets.packing import PackedTextStream, ReadDocument, TextSource, byte_shares, text_bytes
from torchtrain.errors import DataError
from torchtrain.labels import IGNORE_INDEX
from torchtrain.logging import logger

GROUP_WINDOWS = 32
"""A group is the documents that fill so many windows; the last one is read to its end."""


@dataclass(frozen=True)
class Part:
    """Tokens of a document that are in one window: ``tokens`` of them from ``offset`` on."""

    document: int
    """Number in the group."""
    offset: int
    tokens: int


def pack(lengths: Sequence[int], seq_len: int) -> list[list[Part]]:
    """Divide documents of ``lengths`` among windows of ``seq_len + 1`` tokens, by best fit, the longest first.

    A document that does not fit into a window is cut as without this packing: its windows overlap by a token, so that
    each token but the first is predicted once. What is left of it begins a window, for the same reason.
    """
    size = seq_len + 1
    parts = [
        Part(document, start, min(length - start, size))
        for document, length in enumerate(lengths)
        for start in range(0, max(length - 1, 1), seq_len)
    ]
    windows: list[list[Part]] = []
    free: list[tuple[int, int]] = []  # number of free tokens of each window, and its number; sorted
    for part in sorted(parts, key=lambda part: part.tokens, reverse=True):
        place = bisect_left(free, (part.tokens, 0))
        while place < len(free) and part.offset and windows[free[place][1]][0].offset:
            place += 1
        if place < len(free):
            room, window = free.pop(place)
            windows[window].insert(0 if part.offset else len(windows[window]), part)
        else:
            room, window = size, len(windows)
            windows.append([part])
        insort(free, (room - part.tokens, window))
    return windows


class BestFitStream(Stream):
    """Packs the documents of one reader, a group at a time; the windows of a group are in a random order.

    What is left of a window is ``IGNORE_INDEX``, and not predicted. The state is the position of the documents before
    the group, their position after it, and the number of windows that have been drawn from it.
    """

    def __init__(self, source: TextSource, request: StreamRequest, reader: int, readers: int) -> None:
        self._documents = PackedTextStream(source, request, reader, readers)
        self._source = source
        self._seq_len = request.seq_len
        self._seed = request.seed
        self._token_bytes = np.array(request.tokenizer.token_bytes)
        self._begin = self._end = self._documents.state
        self._drawn = 0
        self._group: list[ReadDocument] = []
        self._windows: list[list[Part]] = []

    @property
    def state(self) -> State:
        return (*self._begin, *self._end, self._drawn)

    @state.setter
    def state(self, state: State) -> None:
        if len(state) % 2 == 0:
            raise DataError(f"the saved position in {self._source.name} is of another data.packing")
        half = len(state) // 2
        self._begin, self._end, self._drawn = state[:half], state[half:-1], state[-1]
        self._windows = []

    def resume(self, saved: SavedPosition) -> int:
        """Continue with the documents after those groups of which windows have been drawn."""
        half = saved.states.shape[1] // 2
        begun = saved.states[:, -1:] > 0
        positions = np.where(begun, saved.states[:, half:-1], saved.states[:, :half])
        windows_drawn = self._documents.resume(
            SavedPosition(positions, saved.windows_drawn, saved.seq_len, saved.readers)
        )
        if begun.any():
            logger.info(
                "%s: with another batch or sequence length, the rest of the open group of %d of %d rows is left out, "
                "each at most %s tokens and the end of a document",
                *(self._source.name, begun.sum(), len(begun), f"{GROUP_WINDOWS * (saved.seq_len + 1):,}"),
            )
        self._begin = self._end = self._documents.state
        self._drawn, self._windows = 0, []
        return windows_drawn

    def fill(
        self,
        windows: Sequence[Tokens],
        windows_drawn: Sequence[int],  # noqa: ARG002
        sizes: Sequence[Bytes] | None = None,
    ) -> list[int]:
        for number, window in enumerate(windows):
            window[:], begin = IGNORE_INDEX, 0
            for part in self._next():
                document, of_part = self._group[part.document], slice(part.offset, part.offset + part.tokens)
                window[begin : begin + part.tokens] = document.tokens[of_part]
                if sizes is not None:
                    shares = byte_shares(document.tokens, self._token_bytes, text_bytes(document.text))
                    sizes[number][begin : begin + part.tokens] = shares[of_part]
                begin += part.tokens
        return [len(window) for window in windows]

    def locate(self, windows_drawn: Sequence[int]) -> list[list[Piece]]:
        state, located = self.state, []
        for _ in windows_drawn:
            pieces = [self._group[part.document].piece(part.offset, part.tokens) for part in self._next()]
            located.append(pieces)
        self.state = state
        return located

    def _next(self) -> list[Part]:
        """The parts of the next window."""
        if not self._windows:
            self._read_group()
        if self._drawn == len(self._windows):
            self._begin, self._drawn = self._end, 0
            self._read_group()
        self._drawn += 1
        return self._windows[self._drawn - 1]

    def _read_group(self) -> None:
        self._documents.state = self._begin
        self._group, tokens = [], 0
        while tokens < GROUP_WINDOWS * (self._seq_len + 1):
            self._group.append(self._documents.read_document())
            tokens += len(self._group[-1].tokens)
        self._end = self._documents.state
        packed = pack([len(document.tokens) for document in self._group], self._seq_len)
        order = permute(np.arange(len(packed)), len(packed), stream_seed(self._seed, *self._begin))
        self._windows = [packed[number] for number in order]
