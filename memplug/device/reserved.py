"""The device memory that a step reserves in addition to its tensors, for all planning within a budget.

With the arena, this is the excess of the arena's height over the tensors' peak, which is known once the arena serves,
and the holes in segments of torch's allocator that hold tensors from step to step. Without the arena, it is the cache
of torch's allocator. Steps before the arena serves also use that allocator, which empties its cache when the device is
full: those steps take longer, but no more memory than there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memplug.device.memory import DeviceMemory


@dataclass(frozen=True, slots=True)
class Served:
    """How the arena serves the session's steps.

    Attributes:
        wanted: True if it serves them, or will.
        whole: True if it served all of the step that ended last.
    """

    wanted: bool = False
    whole: bool = False


class Reserved:
    """The memory reserved in addition to tensors by one session's steps.

    Args:
        memory: counters of the device; None if it has none, and then nothing is reserved in addition.
        served: returns how the arena served the step that ended last.
    """

    def __init__(self, memory: DeviceMemory | None, served: Callable[[], Served] = Served):
        self._memory, self._served = memory, served
        self._measured_bytes = 0

    def beside(self, peak_bytes: int) -> int:
        """Return the bytes that a step with this largest allocation total reserves in addition to its tensors."""
        if self._memory is None:
            return 0
        if self._served().wanted:
            return max(self._measured_bytes, self._memory.holes_bytes)
        reserved_bytes, allocated_bytes = self._cached_share()
        return max(0, reserved_bytes - allocated_bytes) * peak_bytes // allocated_bytes

    def largest_peak(self, device_bytes: int) -> int:
        """Return the largest allocation total of a step that reserves no more than these bytes."""
        if self._memory is None:
            return device_bytes
        if self._served().wanted:
            return max(0, device_bytes - self.beside(device_bytes))
        reserved_bytes, allocated_bytes = self._cached_share()
        return device_bytes * allocated_bytes // max(reserved_bytes, allocated_bytes)

    def measure(self, peak_bytes: int) -> int | None:
        """Return the bytes reserved now, after a step with this largest allocation total.

        Returns:
            None if the arena did not serve the whole step, which then says nothing about later steps.
        """
        if self._memory is None or not self._served().whole:
            return None
        reserved_bytes = self._memory.reserved_bytes
        self._measured_bytes = max(self._measured_bytes, reserved_bytes - peak_bytes)
        return reserved_bytes

    def _cached_share(self) -> tuple[int, int]:
        """Return the largest numbers of bytes in the run so far: reserved by torch's allocator, and in tensors."""
        return self._memory.reserved_peak_bytes, max(self._memory.allocated_peak_bytes, 1)
