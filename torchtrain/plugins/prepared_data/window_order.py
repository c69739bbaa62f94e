"""The order in which windows of tokenized data are read: a permutation that is nearly the same for all lengths."""

import functools

import numpy as np
import numpy.typing as npt

from torchtrain.datasets.order import permute, stream_seed

# A group is at most 1/64 of the data, and at most 1024 blocks (unless a single block is more). Windows of a group are
# mixed: so the more blocks it has, the more places of the data a batch is from.
_GROUPS = 64
_BLOCKS_OF_A_GROUP = 1024
# Blocks are about 1/1024 of the data, but not larger than 2^17 tokens, and not more than 2^20.
_BLOCKS = 1024
_LARGEST_BLOCK = 1 << 17
_MOST_BLOCKS = 1 << 20


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def block_size(targets: int, longest: int) -> int:
    """Tokens of a block, for data of ``targets`` tokens and windows of up to ``longest`` tokens: a power of two."""
    wanted = min(targets // _BLOCKS, _LARGEST_BLOCK)
    return power_of_two(max(longest, wanted, -(-targets // _MOST_BLOCKS)))


class WindowOrder:
    """The order of the full windows of ``seq_len`` tokens in each epoch.

    The data are divided into blocks of ``block`` tokens; the last one may have fewer. An epoch permutes the blocks,
    makes a group of every few of them, and permutes the windows that begin in the blocks of a group. Windows of 2
    tokens, blocks of 4, and groups of 2 blocks:

        tokens of the data          0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15
        blocks, permuted            8  9 10 11    0  1  2  3 | 12 13 14 15    4  5  6  7
        windows of each group     0-1  8-9  10-11  2-3       | 14-15  6-7  12-13  4-5

    Neither blocks nor groups depend on ``seq_len``. So a run that changes it between two groups reads nothing twice,
    and leaves nothing out, but for up to ``seq_len`` tokens at the ends of a block that is not a multiple of it.
    """

    def __init__(self, targets: int, seq_len: int, block: int, seed: int) -> None:
        self.seq_len = seq_len
        self.block = block
        self.windows = targets // seq_len
        self._seed = seed
        self._blocks = targets // block  # full ones; what is left is part of the last group
        self._group_size = max(1, min(self._blocks // _GROUPS, _BLOCKS_OF_A_GROUP))
        self._groups = max(1, -(-self._blocks // self._group_size))
        self.ends = functools.lru_cache(4)(self._ends)
        """``ends(epoch)``: the number of windows up to the end of each group, int64 of shape (groups,)."""
        self._windows_of_group = functools.lru_cache(4)(self._permute_group)

    def find(self, epoch: int, number: int) -> tuple[int, int]:
        """The group of the window ``number`` of an epoch, and its place in it."""
        group = int(np.searchsorted(self.ends(epoch), number, side="right"))
        return group, number - int(self.ends(epoch)[group - 1] if group else 0)

    def start(self, epoch: int, number: int) -> int:
        """The first token of the window ``number`` of an epoch; after all full windows, of the rest of the data."""
        if number >= self.windows:
            return self.windows * self.seq_len
        group, place = self.find(epoch, number)
        return int(self._windows_of_group(epoch, group)[place]) * self.seq_len

    def _blocks_in_order(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return permute(positions, self._blocks, stream_seed(self._seed, epoch))

    def _first_windows(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first window that begins in each of ``blocks`` or after it."""
        return np.minimum(-(-blocks * self.block // self.seq_len), self.windows)

    def _ends(self, epoch: int) -> npt.NDArray[np.int64]:
        counts = np.zeros(self._groups, dtype=np.int64)
        if self._blocks:
            order = self._blocks_in_order(epoch, np.arange(self._blocks))
            of_blocks = self._first_windows(order + 1) - self._first_windows(order)
            counts = np.add.reduceat(of_blocks, np.arange(0, self._blocks, self._group_size))
        ends = counts.cumsum()
        ends[-1] = self.windows  # with those of the last block, which is not full
        return ends

    def _permute_group(self, epoch: int, group: int) -> npt.NDArray[np.int64]:
        """The numbers of the windows of a group in the data, in their order."""
        first = group * self._group_size
        blocks = np.arange(first, min(first + self._group_size, self._blocks))
        if len(blocks):
            blocks = self._blocks_in_order(epoch, blocks)
        firsts, ends = self._first_windows(blocks), self._first_windows(blocks + 1)
        if group == self._groups - 1:
            firsts = np.append(firsts, self._first_windows(np.array([self._blocks])))
            ends = np.append(ends, self.windows)
        windows = np.concatenate([np.arange(*pair) for pair in zip(firsts, ends, strict=True)])
        return windows[permute(np.arange(len(windows)), len(windows), stream_seed(self._seed, epoch, group))]
