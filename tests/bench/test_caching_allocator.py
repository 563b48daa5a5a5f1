"""The simulated caching allocator rounds, splits, coalesces and reserves like torch's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.profile.trace import EventKind
from tests.bench.caching_allocator import CachingAllocator, reserved

MIB = 2**20


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB)]
    + [(10 * MIB + 1, 12 * MIB), (33 * MIB, 34 * MIB)],
)
def test_segment_size_follows_the_request_size(nbytes, expected):
    allocator = CachingAllocator()
    allocator.malloc(nbytes)
    assert allocator.reserved_bytes == expected


def test_small_requests_share_a_segment_and_are_rounded_to_512():
    allocator = CachingAllocator()
    handles = [allocator.malloc(513) for _ in range(2048)]
    assert allocator.reserved_bytes == 2 * MIB and allocator.allocated_bytes == 2 * MIB
    assert [block.address for _, block in handles] == list(range(0, 2 * MIB, 1024))
    allocator.malloc(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_large_block_is_split_only_if_more_than_a_mebibyte_remains():
    allocator = CachingAllocator()
    pool_and_block = allocator.malloc(20 * MIB)
    allocator.free(pool_and_block)
    allocator.free(allocator.malloc(19 * MIB))
    assert allocator.peak_allocated_bytes == 20 * MIB, "the whole block: one mebibyte is not split off"
    first, second = allocator.malloc(18 * MIB), allocator.malloc(2 * MIB)
    assert allocator.reserved_bytes == 20 * MIB and second[1].address == first[1].address + 18 * MIB


def test_free_neighbours_merge_within_their_segment():
    allocator = CachingAllocator()
    handles = [allocator.malloc(4 * MIB) for _ in range(5)]
    assert allocator.reserved_bytes == 20 * MIB
    for at in (0, 2, 4, 1, 3):
        allocator.free(handles[at])
    allocator.malloc(20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(40 * MIB)
    assert allocator.reserved_bytes == 80 * MIB, "40 MiB do not fit into two segments of 20"


def test_smallest_sufficient_free_block_serves_a_request():
    allocator = CachingAllocator()
    large, _, small = (allocator.malloc(size * MIB) for size in (40, 12, 24))
    allocator.free(large)
    allocator.free(small)
    assert allocator.malloc(23 * MIB)[1].address == small[1].address


def test_streams_and_pools_never_share_a_block():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB, stream=0))
    allocator.malloc(30 * MIB, stream=1)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.malloc(512, stream=0)
    assert allocator.reserved_bytes == 62 * MIB


def test_expandable_range_grows_at_its_end_by_the_missing_bytes():
    allocator = CachingAllocator(expandable=True)
    first, second = allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)
    allocator.free(first)
    allocator.free(second)
    allocator.malloc(60 * MIB)
    assert allocator.reserved_bytes == 60 * MIB, "both segments and one granule more"


def test_repeated_step_is_served_from_the_cache():
    events = np.array([(EventKind.MALLOC, 0, 30 * MIB, 0), (EventKind.MALLOC, 1, 512, 0), (EventKind.FREE, 0, 0, 0)])
    assert reserved(events, times=1) == reserved(events, times=5) == (32 * MIB, 30 * MIB + 512)


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 1), st.booleans()), max_size=40), st.booleans())
def test_blocks_in_use_never_overlap_and_are_all_reserved(requests, expandable):
    allocator, live = CachingAllocator(expandable=expandable), []
    for nbytes, stream, frees in requests:
        handle = allocator.malloc(nbytes, stream)
        assert handle[1].nbytes >= nbytes
        live.append(handle)
        if frees:
            allocator.free(live.pop(len(live) // 2))
        spans = sorted((block.address, block.address + block.nbytes) for _, block in live)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        assert sum(end - start for start, end in spans) == allocator.allocated_bytes <= allocator.reserved_bytes
    for handle in live:
        allocator.free(handle)
    assert allocator.allocated_bytes == 0
