"""Packing of documents into windows so that few are cut: ``data.packing = "best_fit"``.

By "Fewer Truncations Improve Language Modeling" (Ding et al. 2024, https://arxiv.org/abs/2404.10830).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass


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
