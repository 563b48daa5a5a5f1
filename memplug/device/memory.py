"""What the allocator of a device counts."""

from __future__ import annotations

import abc

import torch


class DeviceMemory(abc.ABC):
    """Bytes and counts as they are when they are asked for; peaks are of the process so far."""

    @property
    @abc.abstractmethod
    def own_bytes(self) -> int:
        """All of the device that other processes do not hold."""

    @property
    @abc.abstractmethod
    def allocated_peak_bytes(self) -> int:
        """The most that tensors had at a time."""

    @property
    @abc.abstractmethod
    def reserved_peak_bytes(self) -> int:
        """The most that the allocator had of the device at a time."""

    @property
    @abc.abstractmethod
    def retries(self) -> int:
        """How often it has had to empty its cache before a request fitted."""


class CudaMemory(DeviceMemory):
    """torch's caching allocator of one CUDA device."""

    def __init__(self, which: torch.device):
        self._which = which

    @property
    def own_bytes(self) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self._which)
        return free_bytes + torch.cuda.memory_reserved(self._which)

    @property
    def allocated_peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._which)

    @property
    def reserved_peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self._which)

    @property
    def retries(self) -> int:
        return torch.cuda.memory_stats_as_nested_dict(self._which)["num_alloc_retries"]
