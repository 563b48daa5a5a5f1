"""ProTrain's equations on cases that are small enough to compute by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.predict.tune.protrain import (
    BlockCounts,
    ChunkTimes,
    MemoryUnits,
    OperatorMemory,
    Placement,
    backward_prefetch_s,
    backward_s,
    base_peak_bytes,
    chunk_size,
    chunks_of,
    forward_prefetch_s,
    forward_s,
    peak_bytes,
    reduce_offload_s,
    step_s,
    wasted_bytes,
)

CHUNKS = [
    ChunkTimes(forward_s=4, backward_s=8, recompute_s=r, gather_s=1, upload_s=u, reduce_s=2, offload_s=o)
    for r, u, o in ((0, 5, 1), (4, 5, 1), (0, 2, 9), (4, 3, 1))
]
"""Four chunks: the second and the last checkpoint; the second is slow to upload, the third to offload."""


def test_persistent_chunk_is_only_gathered_in_forward() -> None:
    times = [forward_prefetch_s(CHUNKS, Placement(2, 0), i) for i in range(1, 6)]
    assert times == [1, 1, 1 + 2, 1 + 3, 0]  # i <= n_persist: 1 and 2
    assert [forward_prefetch_s(CHUNKS, Placement(0, 0), i) for i in (1, 2)] == [6, 6]
    assert [forward_prefetch_s(CHUNKS, Placement(4, 0), i) for i in (4, 5)] == [1, 0]


def test_gradients_of_persistent_chunks_are_not_offloaded() -> None:
    assert [reduce_offload_s(CHUNKS, Placement(2, 0), i) for i in range(1, 6)] == [2, 2, 2 + 9, 2 + 1, 0]


def test_buffered_and_persistent_chunks_are_not_prefetched_again() -> None:
    assert [backward_prefetch_s(CHUNKS, Placement(1, 2), i) for i in range(5)] == [0, 0, 6, 0, 0]
    assert [backward_prefetch_s(CHUNKS, Placement(1, 1), i) for i in (3, 4)] == [3, 0]  # the edge: N - n_buffer = 3
    assert [backward_prefetch_s(CHUNKS, Placement(0, 4), i) for i in range(1, 5)] == [0] * 4
    assert [backward_prefetch_s(CHUNKS, Placement(0, 0), i) for i in (1, 4)] == [6, 4]


def test_forward_prefetches_the_next_chunk_while_one_computes() -> None:
    """Fetch the first chunk alone, in 1 s; then each chunk computes for 4 s, which hides the fetch of the next one."""
    assert forward_s(CHUNKS, Placement(2, 0)) == 1 + 4 + 4 + 4 + 4
    assert forward_s(CHUNKS, Placement(0, 0)) == 6 + 6 + 4 + 4 + 4


def test_backward_overlaps_compute_with_prefetch_and_offload() -> None:
    """Fetch the last chunk alone, in 4 s; then each chunk takes the longest of its compute, prefetch and reduction."""
    assert backward_s(CHUNKS, Placement(2, 0)) == 4 + 12 + 8 + 12 + 8
    slow = [ChunkTimes(forward_s=1, backward_s=1, gather_s=3, reduce_s=5, upload_s=1, offload_s=1)] * 2
    assert backward_s(slow, Placement(0, 1)) == 0 + 4 + 6  # chunk 2 is buffered, 1 is fetched; 2 is reduced meanwhile
    assert backward_s(slow, Placement(2, 0)) == 0 + 1 + 5


def test_host_optimizer_overlaps_backward() -> None:
    forward, backward = forward_s(CHUNKS, Placement(2, 0)), backward_s(CHUNKS, Placement(2, 0))
    assert step_s(CHUNKS, Placement(2, 0), 3, 10) == forward + backward + 3
    assert step_s(CHUNKS, Placement(2, 0), 3, 100) == forward + 100


def test_base_peak_is_the_largest_use_over_all_operators() -> None:
    """Begin with 100 bytes and 30 of activations, of which the first operator frees 20 and the second 10."""
    operators = [
        OperatorMemory(during_bytes=10, during_peak_bytes=50, activation_bytes=20),
        OperatorMemory(before_bytes=5, before_peak_bytes=60, during_peak_bytes=2, activation_bytes=10),
    ]
    assert base_peak_bytes(100, operators) == 180  # 130 + 50; then from 120: 120 + 60, 125 + 2
    assert base_peak_bytes(100, operators[1:]) == 110 + 60
    assert base_peak_bytes(100, []) == 100


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (BlockCounts(4), 1000 + 20 * 2 + 10 * 3),
        (BlockCounts(4, swap=1, checkpoint=2), 1070 - 50 - 2 * 40),
        (BlockCounts(4, swap=1, checkpoint=3), 1070 - 50 - 3 * 40 + 40),
        (BlockCounts(4, checkpoint=4), 1070 - 4 * 40 + 40),
        (BlockCounts(4, swap=4), 1070 - 4 * 50 + 40),
    ],
)
def test_peak_includes_one_recomputed_block_if_all_swap_or_checkpoint(blocks: BlockCounts, expected: int) -> None:
    units = MemoryUnits(persistent=20, buffer=10, swapped=50, checkpointed=40)
    assert peak_bytes(1000, units, Placement(2, 3), blocks) == expected


def test_chunks_do_not_split_blocks() -> None:
    assert chunks_of([30, 30, 50, 10, 70], 80) == [60, 60, 70]
    assert wasted_bytes([30, 30, 50, 10, 70], 80) == 240 - 190
    with pytest.raises(ValueError, match="70 bytes does not fit into a chunk of 60"):
        chunks_of([30, 70], 60)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.sets(st.integers(100, 400), min_size=1))
def test_chosen_chunk_size_wastes_the_fewest_bytes(blocks: list[int], sizes: set[int]) -> None:
    chosen = chunk_size(blocks, sizes)
    assert all(wasted_bytes(blocks, chosen) <= wasted_bytes(blocks, size) for size in sizes)


def test_chunk_size_too_small_for_a_block_is_not_chosen() -> None:
    assert chunk_size([30, 70], [60, 75, 200]) == 75
    with pytest.raises(ValueError, match="70 bytes"):
        chunk_size([30, 70], [60])
