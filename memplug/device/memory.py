"""What the allocator of a device counts."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch


class DeviceMemory(abc.ABC):
    """Bytes and counts as they are when they are asked for.

    Peaks are of the process so far. The allocator's own begin anew whenever a program resets them, as many do to log
    each step's: those that `note` has seen since `begin` count as well.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A session begins: what was noted is of another one."""
        self._noted = (0, 0)

    def note(self) -> None:
        """What the allocator says now; at the end of every step."""
        (allocated, reserved), (allocated_now, reserved_now) = self._noted, self._peaks()
        self._noted = max(allocated, allocated_now), max(reserved, reserved_now)

    @property
    def allocated_peak_bytes(self) -> int:
        """The most that tensors had at a time."""
        self.note()
        return self._noted[0]

    @property
    def reserved_peak_bytes(self) -> int:
        """The most that the allocator had of the device at a time."""
        self.note()
        return self._noted[1]

    @property
    @abc.abstractmethod
    def own_bytes(self) -> int:
        """All of the device that other processes do not hold."""

    @property
    @abc.abstractmethod
    def reserved_bytes(self) -> int:
        """What the allocator has of the device now."""

    @property
    @abc.abstractmethod
    def holes_bytes(self) -> int:
        """What no tensor has of that, and what cannot go back to the device: it lies beside tensors in a segment."""

    @property
    @abc.abstractmethod
    def retries(self) -> int:
        """How often it has had to empty its cache before a request fitted."""

    @abc.abstractmethod
    def _peaks(self) -> tuple[int, int]:
        """The allocator's own, of what tensors had and of what it reserved."""


class CudaMemory(DeviceMemory):
    """torch's caching allocator of one CUDA device."""

    def __init__(self, which: torch.device):
        super().__init__()
        self._which = which

    @property
    def own_bytes(self) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self._which)
        return free_bytes + torch.cuda.memory_reserved(self._which)

    @property
    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._which)

    @property
    def holes_bytes(self) -> int:
        ours = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == self._which.index]
        return sum(each["total_size"] - each["active_size"] for each in ours if _stays(each))

    @property
    def retries(self) -> int:
        return torch.cuda.memory_stats_as_nested_dict(self._which)["num_alloc_retries"]

    def _peaks(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self._which)  # once: it is asked for in every step
        return stats.get("allocated_bytes.all.peak", 0), stats.get("reserved_bytes.all.peak", 0)


def _stays(segment: Mapping[str, Any]) -> bool:
    """Whether a segment, of torch's snapshot, has tensors in it or belongs to a graph; the pages of an expandable one
    that no tensor has go back by themselves.
    """
    of_graph = tuple(segment["segment_pool_id"]) != (0, 0)
    return not segment["is_expandable"] and (segment["active_size"] > 0 or of_graph)
