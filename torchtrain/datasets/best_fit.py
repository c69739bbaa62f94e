"""Packing of documents into windows so that few are cut: ``data.packing = "best_fit"``.

By "Fewer Truncations Improve Language Modeling" (Ding et al. 2024, https://arxiv.org/abs/2404.10830).
"""

import zipfile
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from torchtrain.datasets.cache_folder import locked, windows_root
from torchtrain.datasets.window_order import LEAST_BLOCKS_OF_A_GROUP, WindowOrder
from torchtrain.files import atomic_write

Integers = npt.NDArray[np.int64]

RULES = 1  # version of how documents are packed: increase it if the same documents are packed otherwise
BLOCKS_OF_A_SET = 32


@dataclass(frozen=True)
class PackedWindows:
    """Windows of whole documents, in sets of documents that are packed together.

    Interval ``i`` is the ``tokens[i]`` tokens from ``starts[i]`` on; window ``w`` has those from ``firsts[w]`` up
    to ``firsts[w + 1]``. Set ``s`` has the windows from ``sets[s]`` up to ``sets[s + 1]``.
    """

    starts: Integers
    tokens: Integers
    firsts: Integers
    sets: Integers

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def order(self, block: int, seed: int) -> WindowOrder:  # noqa: ARG002
        """Their order, in which each set is a block: it is from all over the data, so that a group needs fewer."""
        least = LEAST_BLOCKS_OF_A_GROUP // BLOCKS_OF_A_SET
        return WindowOrder(len(self.sets) - 1, self.sets.__getitem__, len(self), seed, least)

    def intervals(self, window: int) -> list[tuple[int, int]]:
        """Start and number of tokens of each interval of a window."""
        own = slice(self.firsts[window], self.firsts[window + 1])
        return list(zip(self.starts[own].tolist(), self.tokens[own].tolist(), strict=True))


def pack_sets(starts: Integers, seq_len: int, block: int) -> PackedWindows:
    """Divide documents into sets, and pack those of each set into windows of ``seq_len + 1`` tokens.

    The data are divided into blocks of ``block`` tokens. Each set has the documents that begin in at least
    ``BLOCKS_OF_A_SET`` blocks (or all), which have the same distance: so the documents of a window are from all over
    the data, and the sets do not depend on ``seq_len``.

    Args:
        starts: the first token of each document in the data, and the number of tokens, int64 of shape (documents + 1,).
        seq_len: the number of tokens that a window predicts.
        block: number of tokens of a block.
    """
    count = max(1, -(-int(starts[-1]) // block) // BLOCKS_OF_A_SET)
    set_of = starts[:-1] // block % count
    order = np.argsort(set_of, kind="stable")
    borders = np.searchsorted(set_of[order], np.arange(count + 1))
    lengths = np.diff(starts)
    packed = []
    for begin, end in pairwise(borders.tolist()):
        own = order[begin:end]
        packed.append(pack(starts[own], lengths[own], seq_len))
    intervals, tokens, counts = (np.concatenate(column) for column in zip(*packed, strict=True))
    sets = np.cumsum([0, *(len(of_set[2]) for of_set in packed)], dtype=np.int64)
    return PackedWindows(intervals, tokens, np.concatenate(([0], counts.cumsum())), sets)


def pack(starts: Integers, lengths: Integers, seq_len: int) -> tuple[Integers, Integers, Integers]:
    """Divide documents among windows of ``seq_len + 1`` tokens, by best fit, the longest first.

    A document that does not fit into a window is cut as without this packing: its windows overlap by a token, so that
    each token but the first is predicted once. What is left of it begins a window of its own, for the same reason.

    Args:
        starts: the first token of each document.
        lengths: the number of tokens of each document.
        seq_len: the number of tokens that a window predicts.

    Returns:
        Start and number of tokens of each interval, and the number of intervals of each window.
    """
    size = seq_len + 1
    is_long = lengths > size
    pieces = -(-(lengths[is_long] - 1) // seq_len)  # of each long document
    numbers = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)
    begins = np.repeat(starts[is_long], pieces) + numbers * seq_len
    tokens = np.minimum(np.repeat((starts + lengths)[is_long], pieces) - begins, size)
    is_short = ~is_long & (lengths > 0)
    order = np.argsort(-lengths[is_short], kind="stable")
    short_starts, short_tokens = starts[is_short][order], lengths[is_short][order]
    # The window of each interval.
    windows = np.array([*range(len(begins)), *_best_fit(tokens, short_tokens, size)], dtype=np.int64)
    in_windows = np.argsort(windows, kind="stable")
    intervals = np.concatenate((begins, short_starts)), np.concatenate((tokens, short_tokens))
    return intervals[0][in_windows], intervals[1][in_windows], np.bincount(windows)


def _best_fit(filled: Integers, lengths: Integers, size: int) -> list[int]:
    """The window of each document, of which the longest come first; ``filled``: the tokens in the first windows."""
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # numbers of the windows with so many free tokens
    least = int(lengths.min(initial=size))
    for number in np.flatnonzero(size - filled >= least).tolist():
        with_room[size - int(filled[number])].append(number)
    rooms = sorted(with_room)  # of which some window has so many free tokens
    count, windows = len(filled), []
    for tokens in lengths.tolist():
        place = bisect_left(rooms, tokens)
        if place == len(rooms):
            room, number = size, count
            count += 1
        else:
            room = rooms[place]
            number = with_room[room].pop()
            if not with_room[room]:
                del rooms[place]
        windows.append(number)
        room -= tokens
        if room >= least:
            if not with_room[room]:
                insort(rooms, room)
            with_room[room].append(number)
    return windows


def cached_windows(key: str, compute: Callable[[], PackedWindows]) -> PackedWindows:
    """The windows that ``compute`` returned when it was first called with ``key``; kept if the cache can be written."""
    name = xxhash.xxh3_128_hexdigest(f"{RULES}, {key}".encode())
    path = windows_root() / f"{name}.npz"
    with ExitStack() as stack:
        if not path.exists():
            with suppress(OSError):
                stack.enter_context(locked(path.with_suffix(".lock")))  # another process may be computing them
        with (
            suppress(OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile),
            path.open("rb") as file,
            np.load(file) as arrays,
        ):
            return PackedWindows(**arrays)
        windows = compute()
        with suppress(OSError), atomic_write(path) as output:
            np.savez(output, **vars(windows))
        return windows
