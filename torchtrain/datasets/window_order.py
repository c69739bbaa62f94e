"""The order in which windows of tokens are read: a permutation of blocks and, in groups of them, of windows."""

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from torchtrain.datasets.order import permute, stream_seed

# An epoch has 64 groups of blocks, but fewer if they would have less than 1024 blocks, so that a batch is drawn from
# about as many places of the data as it has windows; and more if they would have more than 4096.
_GROUPS = 64
LEAST_BLOCKS_OF_A_GROUP = 1024
_MOST_TO_LEAST = 4
# Blocks are as long as the longest windows, or longer where that leaves at least 16 groups, so that a run may change to
# longer windows; up to 2^17 tokens. There are at most 2^20 blocks.
_LEAST_GROUPS = 16
_LARGEST_BLOCK = 1 << 17
_MOST_BLOCKS = 1 << 20


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def block_size(targets: int, longest: int) -> int:
    """Tokens of a block, for data of ``targets`` tokens and windows of up to ``longest`` tokens: a power of two."""
    room = min(targets // (_LEAST_GROUPS * LEAST_BLOCKS_OF_A_GROUP), _LARGEST_BLOCK)
    largest = (1 << room.bit_length()) // 2  # the largest power of two up to room
    return max(power_of_two(max(longest, -(-targets // _MOST_BLOCKS))), largest)


class WindowOrder:
    """The order of the windows in each epoch.

    The data are divided into blocks, of tokens or of documents. A number of consecutive blocks form a stratum, and each
    group of an epoch has one block of every stratum, so that it is from all over the data (stratified sampling). The
    windows that begin in the blocks of a group are permuted. Windows of 2 tokens, blocks of 4, and strata of 2 blocks,
    so that there are 2 groups:

        tokens of the data         0  1  2  3   4  5  6  7 |  8  9 10 11  12 13 14 15
        group of each block             1           0      |       0           1
        windows of each group      10-11  4-5  6-7  8-9    |  2-3  14-15  0-1  12-13

    Neither blocks nor groups depend on the length of windows. So a run that changes it between two groups reads nothing
    twice, and leaves nothing out, but for up to a window at the ends of a block that is not a multiple of it.

    Args:
        blocks: number of blocks.
        first_windows: returns for each block the first window that begins in it or after it, by their numbers in the
            data; also for the number after the last block: later windows are part of the last group.
        windows: number of windows.
        seed: of the order.
        least_blocks: minimum number of blocks of a group: a smaller one if each block is from all over the data.
    """

    def __init__(
        self,
        blocks: int,
        first_windows: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
        windows: int,
        seed: int,
        least_blocks: int = LEAST_BLOCKS_OF_A_GROUP,
    ) -> None:
        self.windows = windows
        self._first_windows = first_windows
        self._seed = seed
        self._blocks = blocks
        most = max(_GROUPS, self._blocks // (_MOST_TO_LEAST * least_blocks))
        self.groups = max(1, min(self._blocks // least_blocks, most))
        # Strata have ``groups`` blocks, a few of them one less.
        strata = -(-self._blocks // self.groups)
        self._borders = np.arange(strata + 1) * self._blocks // max(1, strata)
        self.ends = functools.lru_cache(4)(self._ends)
        """``ends(epoch)``: the number of windows up to the end of each group, int64 of shape (groups,)."""
        self._groups_of_blocks = functools.lru_cache(2)(self._assign_groups)
        self._windows_of_group = functools.lru_cache(4)(self._permute_group)
        self._latest = 0, range(0), np.empty(0, dtype=np.int64)  # epoch, windows and their order of a group

    def find(self, epoch: int, number: int) -> tuple[int, int]:
        """The group of the window ``number`` of an epoch, and its place in it; the last group if there is none."""
        group = min(int(np.searchsorted(self.ends(epoch), number, side="right")), self.groups - 1)
        return group, number - int(self.ends(epoch)[group - 1] if group else 0)

    def window(self, epoch: int, number: int) -> int:
        """The number in the data of the window ``number`` of an epoch."""
        latest, numbers, order = self._latest
        if epoch != latest or number not in numbers:
            group, place = self.find(epoch, number)
            order, first = self._windows_of_group(epoch, group), number - place
            numbers = range(first, first + len(order))
            self._latest = epoch, numbers, order
        return int(order[number - numbers.start])

    def _assign_groups(self, epoch: int) -> npt.NDArray[np.int64]:
        """The group of each block: blocks of a stratum are in consecutive groups, beginning with any of them."""
        sizes = np.diff(self._borders)
        firsts = permute(np.arange(len(sizes)), len(sizes), stream_seed(self._seed, epoch))
        stratum = np.repeat(np.arange(len(sizes)), sizes)
        return (np.arange(self._blocks) - self._borders[stratum] + firsts[stratum]) % sizes[stratum]

    def _ends(self, epoch: int) -> npt.NDArray[np.int64]:
        of_blocks = np.diff(self._first_windows(np.arange(self._blocks + 1)))
        ends = np.bincount(self._groups_of_blocks(epoch), of_blocks, self.groups).astype(np.int64).cumsum()
        ends[-1] = self.windows  # with those after the last block
        return ends

    def _permute_group(self, epoch: int, group: int) -> npt.NDArray[np.int64]:
        """The numbers of the windows of a group in the data, in their order."""
        blocks = np.flatnonzero(self._groups_of_blocks(epoch) == group)
        firsts, ends = self._first_windows(blocks), self._first_windows(blocks + 1)
        if group == self.groups - 1:
            firsts = np.append(firsts, self._first_windows(np.array([self._blocks])))
            ends = np.append(ends, self.windows)
        counts = ends - firsts
        begins = counts.cumsum() - counts  # of each block's windows among all
        windows: npt.NDArray[np.int64] = np.arange(counts.sum()) + np.repeat(firsts - begins, counts)
        return windows[permute(np.arange(len(windows)), len(windows), stream_seed(self._seed, epoch, group))]
