"""The statistics of torch's CUDA allocator."""

from __future__ import annotations

import gc

import pytest
import torch

from memplug.device.device import CudaDevice

MIB = 1 << 20


@pytest.mark.gpu
def test_holes_are_free_bytes_in_segments_with_tensors() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    memory = CudaDevice(0).memory
    before, reserved = memory.holes_bytes, memory.reserved_bytes
    with torch.cuda.use_mem_pool(
        torch.cuda.MemPool()
    ):  # a pool of its own has no free segments that the tensors could go to
        lasting, freed = (torch.empty(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    del freed
    assert memory.reserved_bytes - reserved == 20 * MIB
    assert memory.holes_bytes - before == 16 * MIB
    large = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del large
    assert memory.holes_bytes - before == 16 * MIB, "a wholly free segment can be released"
    assert lasting.numel() == 4 * MIB
