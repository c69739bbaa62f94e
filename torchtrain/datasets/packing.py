"""Streams of windows of ``seq_len + 1`` tokens. The package's docstring explains the terms.

A window begins with the last token of the one before, so that every token is predicted exactly once.
"""

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from torchtrain.datasets.order import permute, stream_seed
from torchtrain.datasets.prepared import PreparedTokens
from torchtrain.datasets.text import TextSource, text_bytes
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import DataError

Tokens = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.float64]
State = tuple[int, ...]


def byte_shares(tokens: Tokens, token_bytes: npt.NDArray[np.int64], size: int) -> Bytes:
    """``size``, the bytes of a document, as the shares of its ``tokens``; they add up to it.

    A share is proportional to what the token stands for, ``token_bytes``. So a space that a tokenizer adds, a
    character that it normalizes or does not know change no sum.
    """
    counted = token_bytes[tokens]
    total = counted.sum()
    return counted * (size / total) if total else np.full(len(tokens), size / len(tokens))


class PackedTextStream:
    """Packs the documents of one lane, each as bos, tokens, eos; where bos and eos are one token, it is there once.

    Lane 1 of 2, over a source of 4 units:

        numbers of units over all epochs   0 [1] 2 [3]   4 [5] 6 [7]   the lane reads those in brackets
        what they are in the source        2  0  3  1    1  3  0  2    a permutation for each epoch

    The state is its place: (number of the unit, document in it, token in that).
    """

    def __init__(self, source: TextSource, tokenizer: Tokenizer, lane: int, lanes: int, seed: int, repeat: bool):
        self._source = source
        self._tokenizer = tokenizer
        self._lane = lane
        self._lanes = lanes
        self._seed = seed
        self._repeat = repeat
        self._token_bytes = np.array(tokenizer.token_bytes)
        self.state = (lane, 0, 0)

    @property
    def state(self) -> State:
        return self._number, self._document, self._token

    @state.setter
    def state(self, state: State) -> None:
        self._number, self._document, self._token = state
        if self._number % self._lanes != self._lane:  # of another number of lanes: some would read the same units
            raise DataError(
                f"the saved place in {self._source.name} is not one of {self._lanes} streams: resume with the same "
                "data.streams and data.download, and with data of the same kind"
            )
        self._documents = self._read_documents()
        self._tokens: Tokens | None = None  # of the document that the state is in
        self._bytes: Bytes | None = None  # of these tokens, if they are asked for

    def fill(
        self,
        windows: Sequence[Tokens],
        turns: Sequence[int],  # noqa: ARG002
        sizes: Sequence[Bytes] | None = None,
    ) -> list[int]:
        return [self._fill(window, sizes[i] if sizes else None) for i, window in enumerate(windows)]

    def _fill(self, window: Tokens, sizes: Bytes | None) -> int:
        filled, self._begun_at, self._length = 0, self._number, len(window)
        self._whole: set[int] = set()  # units read from their first document on for this window
        while filled < len(window):
            if self._tokens is None:
                self._tokens, size = next(self._documents, (None, 0))
                if self._tokens is None:
                    return filled
                self._bytes = None if sizes is None else byte_shares(self._tokens, self._token_bytes, size)
            part = slice(self._token, self._token + len(window) - filled)
            taken = self._tokens[part]
            window[filled : filled + len(taken)] = taken
            if sizes is not None and self._bytes is not None:
                sizes[filled : filled + len(taken)] = self._bytes[part]
            filled += len(taken)
            self._token += len(taken)
            if filled < len(window):
                self._document, self._token, self._tokens = self._document + 1, 0, None
        self._token -= 1  # The last token is the first input of the next window.
        return filled

    def _read_documents(self) -> Iterator[tuple[Tokens, int]]:
        """Tokens and number of bytes of each document that has text, from the state on."""
        units = self._source.units
        while self._repeat or self._number < units:
            # More than an epoch since ``_fill`` began, and every unit was read in full: the window will never be full.
            if self._number > self._begun_at + self._lanes * units and len(self._whole) == units:
                raise DataError(
                    f"{self._source.name} has too little text: all of it does not fill one window of "
                    f"training.seq_len + 1 = {self._length} tokens; give more, or lower training.seq_len"
                )
            epoch, place = divmod(self._number, units)
            unit = int(permute(np.array([place]), units, stream_seed(self._seed, epoch))[0])
            if self._number != self._begun_at:
                self._whole.add(unit)
            for number, text in self._source.read(unit, self._document):
                if text is None:
                    self._source.count_skipped()
                elif text:
                    self._document = number
                    tokens = np.array(self._tokenizer.encode(text, bos=True, eos=True), dtype=np.int64)
                    if len(tokens):  # a tokenizer may know no character of it
                        yield tokens, text_bytes(text)
            self._number, self._document = self._number + self._lanes, 0


class TokenWindowStream:
    """Reads windows of prepared data, in another permutation each epoch.

    The turn alone says which window is next. So one stream serves all rows, and its state is empty.
    """

    _BLOCK = 1024  # The permutation of many numbers takes little more time than that of one.

    def __init__(self, source: PreparedTokens, tokenizer: Tokenizer, seq_len: int, seed: int, repeat: bool):
        self.state: State = ()
        self._source = source
        self._token_bytes = np.array(tokenizer.token_bytes)
        self._seq_len = seq_len
        self._seed = seed
        self._repeat = repeat
        targets = max(0, len(source) - 1)
        self._full = targets // seq_len
        # What is repeated is cut after the last full window; what is read once is read to its end.
        self._windows = self._full if repeat else -(-targets // seq_len)
        self._block = functools.lru_cache(64)(self._make_block)
        if self._windows == 0:
            raise DataError(
                f"{source.name} has too little text: its {len(source)} tokens do not fill a window of "
                f"training.seq_len + 1 = {seq_len + 1} tokens"
            )

    def fill(self, windows: Sequence[Tokens], turns: Sequence[int], sizes: Sequence[Bytes] | None = None) -> list[int]:
        starts, filled = [], []
        for window, turn in zip(windows, turns, strict=True):
            epoch, number = divmod(turn, self._windows)
            block, place = divmod(number, self._BLOCK)
            starts.append(self._block(epoch, block)[place])
            ended = epoch > 0 and not self._repeat
            filled.append(0 if ended else min(len(window), len(self._source) - starts[-1]))
        self._source.read(starts, [window[:count] for window, count in zip(windows, filled, strict=True)])
        for window, count, size in zip(windows, filled, sizes or (), strict=False):
            size[:count] = self._token_bytes[window[:count]] * self._source.byte_scale
        return filled

    def _make_block(self, epoch: int, block: int) -> list[int]:
        """For ``_BLOCK`` turns in a row, the first token of the window."""
        order = np.arange(block * self._BLOCK, min(self._windows, (block + 1) * self._BLOCK))
        full = order < self._full  # the last window may not be
        order[full] = permute(order[full], self._full, stream_seed(self._seed, epoch))
        return (order * self._seq_len).tolist()


Stream = PackedTextStream | TokenWindowStream
"""Windows for one or more rows of the batch.

``fill(windows, turns, sizes)`` writes the next tokens into each window, and returns how many, fewer than fit only at
the end of the data. ``turns``: for each window, how many the source has given to all rows of all ranks before it.
``sizes``: for each window, where to write how many bytes of text each token stands for. DataError: all of the source
does not fill one window, and it would be repeated to do so.

``state``: where the next window begins; set it to resume there. A streamed file is then read up to that place.
"""
