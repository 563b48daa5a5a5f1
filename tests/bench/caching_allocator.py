"""A simulation of torch's CUDA caching allocator, the baseline of the planners: how much it reserves for a step.

It follows c10/cuda/CUDACachingAllocator.cpp: sizes rounded to 512 bytes, one pool for small requests and one for large,
best fit by size and then address, splitting, and coalescing with free neighbours. No garbage collection, no cudaFree:
the device is large enough. With expandable segments each stream and pool has one range that grows at its end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from memplug.profile.trace import EventKind

SMALLEST_BYTES = 512  # kMinBlockSize
SMALL_BYTES = 2**20  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * 2**20  # kLargeBuffer
LARGE_BYTES = 10 * 2**20  # kMinLargeAlloc: requests from this size on have a segment of their own
ROUND_BYTES = 2 * 2**20  # kRoundLarge


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    nbytes: int
    free: bool
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True)
class _Pool:
    """One stream's pool: its free blocks by size and address, and the last block of its expandable range."""

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)  # free ones, by address
    tail: _Block | None = None

    def add(self, block: _Block) -> None:
        block.free = True
        insort(self.free, (block.nbytes, block.address))
        self.blocks[block.address] = block

    def take(self, block: _Block) -> None:
        block.free = False
        self.free.pop(bisect_left(self.free, (block.nbytes, block.address)))
        del self.blocks[block.address]


class CachingAllocator:
    """The state of the allocator.

    Attributes:
        reserved_bytes: Bytes of all segments; they only grow.
        allocated_bytes: Bytes in use; each request is rounded up to a multiple of 512.
        peak_allocated_bytes: The largest `allocated_bytes` so far.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.reserved_bytes = self.allocated_bytes = self.peak_allocated_bytes = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._end = 0  # end of the addresses handed out so far

    def malloc(self, nbytes: int, stream: int = 0) -> tuple[_Pool, _Block]:
        """Return a block of at least that size."""
        size = -(-nbytes // SMALLEST_BYTES) * SMALLEST_BYTES
        small = size <= SMALL_BYTES
        pool = self._pools.setdefault((stream, small), _Pool(small))
        at = bisect_left(pool.free, (size, 0))
        if at < len(pool.free):
            block = pool.blocks[pool.free[at][1]]
        else:
            block = self._expanded(pool, size) if self.expandable else self._segment(pool, size)
        pool.take(block)
        left = block.nbytes - size
        if left >= SMALLEST_BYTES if small or self.expandable else left > SMALL_BYTES:
            self._split(pool, block, size)
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return pool, block

    def free(self, handle: tuple[_Pool, _Block]) -> None:
        """Release a block that `malloc` returned, merging it with free neighbours."""
        pool, block = handle
        self.allocated_bytes -= block.nbytes
        for other in (block.before, block.after):
            if other is not None and other.free:
                pool.take(other)
                block = _merged(pool, block, other)
        pool.add(block)

    def _segment(self, pool: _Pool, size: int) -> _Block:
        if pool.small:
            nbytes = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES:
            nbytes = LARGE_SEGMENT_BYTES
        else:
            nbytes = -(-size // ROUND_BYTES) * ROUND_BYTES
        self.reserved_bytes += nbytes
        # A gap of one byte between segments, so that they are never coalesced.
        block = _Block(self._end, nbytes, free=True)
        self._end += nbytes + 1
        pool.add(block)
        return block

    def _expanded(self, pool: _Pool, size: int) -> _Block:
        tail, granule = pool.tail, SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES
        at_hand = tail.nbytes if tail is not None and tail.free else 0
        nbytes = -(-(size - at_hand) // granule) * granule
        self.reserved_bytes += nbytes
        if tail is None:
            # No range ever needs more addresses than this.
            block = _Block(len(self._pools) << 56, nbytes, free=True)
        elif tail.free:
            pool.take(tail)
            tail.nbytes += nbytes
            block = tail
        else:
            block = _Block(tail.address + tail.nbytes, nbytes, free=True, before=tail)
            tail.after = block
        pool.tail = block
        pool.add(block)
        return block

    @staticmethod
    def _split(pool: _Pool, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.nbytes - size, free=True, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, size
        if pool.tail is block:
            pool.tail = rest
        pool.add(rest)


def _merged(pool: _Pool, block: _Block, other: _Block) -> _Block:
    """Merge two neighbours that the pool no longer lists, and return them as one block."""
    first, second = (other, block) if other is block.before else (block, other)
    first.nbytes += second.nbytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    if pool.tail is second:
        pool.tail = first
    return first


def reserved(events: np.ndarray, *, expandable: bool = False, times: int = 3) -> tuple[int, int]:
    """Return the bytes reserved and the most bytes allocated after some runs of a step, as in warm training.

    Args:
        events: int64[k, 4], in order: kind (`EventKind`), running number of the request, its bytes (above 0), its
            stream. Requests that are not freed are freed when the next run begins.
        expandable: As `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
        times: Number of runs.
    """
    allocator = CachingAllocator(expandable=expandable)
    rows = events.tolist()
    live: dict[int, tuple[_Pool, _Block]] = {}
    for _ in range(times):
        for handle in live.values():
            allocator.free(handle)
        live.clear()
        for kind, request, nbytes, stream in rows:
            if kind == EventKind.MALLOC:
                live[request] = allocator.malloc(nbytes, stream)
            else:
                allocator.free(live.pop(request))
    return allocator.reserved_bytes, allocator.peak_allocated_bytes
