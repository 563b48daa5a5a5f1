"""Sizes in bytes that several parts of memplug use."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30

BLOCK_BYTES = 512
"""Torch's CUDA allocator (c10/cuda/CUDACachingAllocator, kMinBlockSize) and the arena round requests up to a multiple
of this. memplug/native/blocks.h has the constant for C++."""

HOST_ROW_BYTES = 512
"""Rows in pinned host memory are rounded up to a multiple of this. memplug/device/native/host_rows.h has the constant
for C++."""

UNLIMITED_BYTES = 2**62
"""More bytes than any memory has; the sum with another size still fits an int64."""


def rounded_up(nbytes: int, multiple_bytes: int) -> int:
    """Return the smallest multiple of `multiple_bytes` that is at least `nbytes`; works elementwise on arrays."""
    return -(-nbytes // multiple_bytes) * multiple_bytes
