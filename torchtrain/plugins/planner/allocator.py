"""Model of PyTorch's CUDA caching allocator: the memory it reserves for a sequence of allocations.

The model follows ``c10/cuda/CUDACachingAllocator.cpp``. Each stream has two pools, one for blocks up to 1 MiB and one
for larger blocks. An allocation takes the smallest free block of its pool that is large enough, among blocks of equal
size the one with the lowest address, and splits off the rest. With ``expandable_segments`` a pool is one segment that
grows at its end. The allocator treats the free block at that end as if it had the segment's maximum size, so every
other block that fits is preferred to it. Without ``expandable_segments``, segments have fixed sizes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20  # largest allocation of the small pool
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20  # for allocations of the large pool below MIN_LARGE
MIN_LARGE = 10 << 20
ROUND_LARGE = 2 << 20  # segments for larger allocations are rounded up to a multiple of this


class Allocation(NamedTuple):
    """Allocation of ``bytes`` for the storage ``key`` on ``stream``. 0 bytes mean that the storage is freed."""

    key: int
    bytes: int
    stream: int


class _Pool:
    """The blocks of one stream that are either all small or all large."""

    def __init__(self, small: bool, expandable: bool):
        self.small, self.expandable = small, expandable
        self.free: list[tuple[int, int]] = []  # (size, address), sorted
        # The list omits the free block at the end of an expandable segment, which reaches from ``top`` to ``reserved``.
        self.top = self.reserved = 0

    def allocate(self, size: int) -> tuple[int, int]:
        """Allocate a block of at least ``size`` bytes; return its size and address."""
        at = bisect_left(self.free, (size, 0))
        if at < len(self.free):
            length, address = self.free.pop(at)
        elif self.expandable:
            length, address = size, self.top
            self.top += size
            self.reserved = max(self.reserved, _round_up(self.top, SMALL_SEGMENT if self.small else LARGE_SEGMENT))
        else:
            large = LARGE_SEGMENT if size < MIN_LARGE else _round_up(size, ROUND_LARGE)
            length, address = SMALL_SEGMENT if self.small else large, self.top + 1
            self.top = address + length + 1  # a gap on both sides, so that blocks of two segments are never merged
            self.reserved += length
        rest = length - size
        if rest and (self.small or self.expandable or rest > SMALL_SIZE):
            insort(self.free, (rest, address + size))
            length = size
        return length, address

    def release(self, size: int, address: int) -> None:
        """Free a block and merge it with adjacent free blocks."""
        neighbors = [block for block in self.free if sum(block) == address or block[1] == address + size]
        for neighbor in neighbors:
            self.free.remove(neighbor)
            size, address = size + neighbor[0], min(address, neighbor[1])
        if address + size == self.top:
            self.top = address
        else:
            insort(self.free, (size, address))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def peak_reserved(allocations: Iterable[Allocation], *, expandable_segments: bool = True) -> int:
    """Peak reserved bytes. The allocator never returns a segment to the device, as while the device has free memory."""
    pools: dict[tuple[int, bool], _Pool] = {}
    blocks: dict[int, tuple[_Pool, int, int]] = {}
    for key, bytes, stream in allocations:
        if key in blocks:
            pool, size, address = blocks.pop(key)
            pool.release(size, address)
        if bytes:
            size = _round_up(bytes, MIN_BLOCK)
            small = size <= SMALL_SIZE
            pool = pools.setdefault((stream, small), _Pool(small, expandable_segments))
            blocks[key] = pool, *pool.allocate(size)
    return sum(pool.reserved for pool in pools.values())
