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


class _Block:
    __slots__ = ("address", "free", "next", "previous", "size")

    def __init__(self, address: int, size: int, previous: "_Block | None" = None, next: "_Block | None" = None):
        self.address, self.size, self.previous, self.next, self.free = address, size, previous, next, False


class _Pool:
    """The blocks of one stream and size class."""

    def __init__(self, small: bool, expandable: bool):
        self.small, self.expandable = small, expandable
        self.free: list[tuple[int, int, _Block]] = []  # by size
        self.last: _Block | None = None  # of an expandable segment
        self.end = 0  # the address of what is reserved next

    def allocate(self, size: int) -> tuple[_Block, int]:
        """A block of at least ``size``, and how many bytes had to be reserved for it."""
        at = bisect_left(self.free, (size, 0))
        if at + 1 < len(self.free) and self.free[at][2] is self.last:
            at += 1
        if at < len(self.free):
            block = self.free.pop(at)[2]
            block.free = False
            self._split(block, size)
            return block, 0
        if not self.expandable:
            reserved = self._segment(size)
            block = _Block(self.end, reserved)
        else:
            page = SMALL_SEGMENT if self.small else LARGE_SEGMENT
            end = self.last if self.last is not None and self.last.free else None
            missing = size - (end.size if end is not None else 0)
            reserved = -(-missing // page) * page
            if end is not None:
                self._take(end)
                end.size += reserved
                end.free = False
                block = end
            else:
                block = _Block(self.end, reserved, previous=self.last)
                if self.last is not None:
                    self.last.next = block
                self.last = block
        self.end += reserved
        self._split(block, size)
        return block, reserved

    def _segment(self, size: int) -> int:
        if self.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        if rest < MIN_BLOCK or not (self.small or self.expandable or rest > SMALL_SIZE):
            return
        block.size = size
        other = _Block(block.address + size, rest, previous=block, next=block.next)
        if block.next is not None:
            block.next.previous = other
        block.next = other
        if self.last is block:
            self.last = other
        self._put(other)

    def release(self, block: _Block) -> None:
        for neighbor in (block.previous, block.next):
            if neighbor is not None and neighbor.free:
                self._take(neighbor)
                first, second = (neighbor, block) if neighbor is block.previous else (block, neighbor)
                first.size += second.size
                first.next = second.next
                if second.next is not None:
                    second.next.previous = first
                if self.last is second:
                    self.last = first
                block = first
        self._put(block)

    def _put(self, block: _Block) -> None:
        block.free = True
        insort(self.free, (block.size, block.address, block))

    def _take(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]
        block.free = False


def peak_reserved(allocations: Iterable[Allocation], *, expandable_segments: bool = True) -> int:
    """The most bytes that are reserved at once; nothing is given back to the device, as while there is enough."""
    pools: dict[tuple[int, bool], _Pool] = {}
    blocks: dict[int, tuple[_Pool, _Block]] = {}
    reserved = 0
    for key, bytes, stream in allocations:
        if key in blocks:
            pool, block = blocks.pop(key)
            pool.release(block)
        if bytes:
            size = -(-bytes // MIN_BLOCK) * MIN_BLOCK
            small = size <= SMALL_SIZE
            pool = pools.setdefault((stream, small), _Pool(small, expandable_segments))
            block, more = pool.allocate(size)
            blocks[key] = pool, block
            reserved += more
    return reserved
