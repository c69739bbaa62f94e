"""What PyTorch's caching allocator would reserve on a GPU for a sequence of allocations.

After ``c10/cuda/CUDACachingAllocator.cpp``: each stream has two pools, for blocks up to 1 MiB and for larger ones. An
allocation takes the smallest free block of its pool that is large enough, of equal ones that with the lowest address,
and splits off what it does not need. With ``expandable_segments`` each pool is one segment that grows at its end; the
free block there counts as large as it can grow, so any other goes before it. Else segments have fixed sizes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20  # the largest allocation of the small pool
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20  # for allocations of the large pool under MIN_LARGE
MIN_LARGE = 10 << 20
ROUND_LARGE = 2 << 20  # to a multiple of which larger ones are rounded


class Allocation(NamedTuple):
    """``bytes`` for the storage ``key`` on ``stream``; 0 bytes: it is freed."""

    key: int
    bytes: int
    stream: int


class _Pool:
    """The blocks of one stream and size class."""

    def __init__(self, small: bool, expandable: bool):
        self.small, self.expandable = small, expandable
        self.free: list[tuple[int, int]] = []  # size and address, sorted
        # With expandable segments the free block at the end is not among these: it is from ``top`` to ``reserved``.
        self.top = self.reserved = 0

    def allocate(self, size: int) -> tuple[int, int]:
        """Size and address of a block of at least ``size``."""
        at = bisect_left(self.free, (size, 0))
        if at < len(self.free):
            length, address = self.free.pop(at)
        elif self.expandable:
            length, address = size, self.top
            self.top += size
            self.reserved = max(self.reserved, _up(self.top, SMALL_SEGMENT if self.small else LARGE_SEGMENT))
        else:
            large = LARGE_SEGMENT if size < MIN_LARGE else _up(size, ROUND_LARGE)
            length, address = SMALL_SEGMENT if self.small else large, self.top + 1
            self.top = address + length + 1  # gaps before and after: blocks of two segments are never joined
            self.reserved += length
        rest = length - size
        if rest and (self.small or self.expandable or rest > SMALL_SIZE):
            insort(self.free, (rest, address + size))
            length = size
        return length, address

    def release(self, size: int, address: int) -> None:
        neighbors = [block for block in self.free if sum(block) == address or block[1] == address + size]
        for neighbor in neighbors:
            self.free.remove(neighbor)
            size, address = size + neighbor[0], min(address, neighbor[1])
        if address + size == self.top:
            self.top = address
        else:
            insort(self.free, (size, address))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def peak_reserved(allocations: Iterable[Allocation], *, expandable_segments: bool = True) -> int:
    """The most bytes that are reserved at once; nothing is given back to the device, as while there is enough."""
    pools: dict[tuple[int, bool], _Pool] = {}
    blocks: dict[int, tuple[_Pool, int, int]] = {}
    for key, bytes, stream in allocations:
        if key in blocks:
            pool, size, address = blocks.pop(key)
            pool.release(size, address)
        if bytes:
            size = _up(bytes, MIN_BLOCK)
            small = size <= SMALL_SIZE
            pool = pools.setdefault((stream, small), _Pool(small, expandable_segments))
            blocks[key] = pool, *pool.allocate(size)
    return sum(pool.reserved for pool in pools.values())
