"""Sizes in bytes that several rooms count with."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30

BLOCK_BYTES = 512
"""What torch's CUDA allocator rounds every request up to (c10/cuda/CUDACachingAllocator, kMinBlockSize), and the arena;
memplug/native/blocks.h has it for C++.
"""

HOST_ROW_BYTES = 512
"""What rows of pinned host memory are rounded up to; memplug/device/native/host_rows.h has it for C++."""

UNLIMITED_BYTES = 2**62
"""More than any memory has, and still an int64 where another size is added."""


def rounded_up(nbytes: int, multiple_bytes: int) -> int:
    """Returns the smallest multiple of `multiple_bytes` that is `nbytes` or more; of an array, each of its elements."""
    return -(-nbytes // multiple_bytes) * multiple_bytes
