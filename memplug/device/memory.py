"""The counters of a device's memory allocator."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch


class DeviceMemory(abc.ABC):
    """Counters of an allocator, each read at the moment of the call.

    Many programs reset the allocator's own peaks in each step, to log the peak of that step. So `note` remembers the
    largest peaks that it has seen since `begin`.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all noted peaks; called when a session begins."""
        self._noted = (0, 0)

    def note(self) -> None:
        """Note the allocator's peaks; called at the end of every step."""
        (allocated, reserved), (allocated_now, reserved_now) = self._noted, self._peaks()
        self._noted = max(allocated, allocated_now), max(reserved, reserved_now)

    @property
    def allocated_peak_bytes(self) -> int:
        """Return the most bytes that tensors held at once."""
        self.note()
        return self._noted[0]

    @property
    def reserved_peak_bytes(self) -> int:
        """Return the most bytes that the allocator had reserved at once."""
        self.note()
        return self._noted[1]

    @property
    @abc.abstractmethod
    def own_bytes(self) -> int:
        """Return the bytes of the device that other processes do not hold."""

    @property
    @abc.abstractmethod
    def reserved_bytes(self) -> int:
        """Return the bytes that the allocator has reserved now."""

    @property
    @abc.abstractmethod
    def holes_bytes(self) -> int:
        """Return the unused bytes of segments that cannot return to the device because tensors are in them."""

    @property
    @abc.abstractmethod
    def retries(self) -> int:
        """Return how often the allocator had to empty its cache to serve a request."""

    @abc.abstractmethod
    def _peaks(self) -> tuple[int, int]:
        """Return the allocator's own peaks in bytes: (held by tensors, reserved)."""


class CudaMemory(DeviceMemory):
    """torch's caching allocator of one CUDA device."""

    def __init__(self, which: torch.device):
        super().__init__()
        self._which = which

    @property
    def own_bytes(self) -> int:
        """Return the device's free bytes plus those that torch has reserved."""
        free_bytes, _ = torch.cuda.mem_get_info(self._which)
        return free_bytes + torch.cuda.memory_reserved(self._which)

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that torch has reserved now."""
        return torch.cuda.memory_reserved(self._which)

    @property
    def holes_bytes(self) -> int:
        """Return the unused bytes of segments that cannot return to the device."""
        ours = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == self._which.index]
        return sum(each["total_size"] - each["active_size"] for each in ours if _stays(each))

    @property
    def retries(self) -> int:
        """Return how often torch had to empty its cache to serve a request."""
        return torch.cuda.memory_stats_as_nested_dict(self._which)["num_alloc_retries"]

    def _peaks(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self._which)  # called once, since this runs in every step
        return stats.get("allocated_bytes.all.peak", 0), stats.get("reserved_bytes.all.peak", 0)


def _stays(segment: Mapping[str, Any]) -> bool:
    """Return whether a segment of torch's snapshot must stay: tensors are in it, or it belongs to a CUDA graph.

    An expandable segment never has to stay whole: it returns unused pages by itself.
    """
    of_graph = tuple(segment["segment_pool_id"]) != (0, 0)
    return not segment["is_expandable"] and (segment["active_size"] > 0 or of_graph)
