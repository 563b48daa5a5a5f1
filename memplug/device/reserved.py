"""The device memory that a step reserves in addition to its tensors; every plan within a budget counts it.

With the arena this memory has two shares. One is the excess of the arena's height over the tensors' peak; it is known
once the arena serves. The other is the holes in segments of torch's allocator that hold tensors from step to step.

Without the arena this memory is the cache of torch's allocator. Steps before the arena serves use that allocator too:
it empties its cache when the device is full, so they take longer, but no more memory than there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memplug.device.memory import DeviceMemory


@dataclass(frozen=True, slots=True)
class Served:
    """How the arena serves the session's steps.

    Attributes:
        wanted: True if the arena serves steps, or will.
        whole: True if the arena served all of the step that ended last.
    """

    wanted: bool = False
    whole: bool = False


class Reserved:
    """The device memory that a session's steps reserve in addition to their tensors, measured and predicted.

    Args:
        memory: the device's counters of memory; None if the device has none: then that memory counts as 0.
        served: returns how the arena served the step that ended last.
    """

    def __init__(self, memory: DeviceMemory | None, served: Callable[[], Served] = Served):
        self._memory, self._served = memory, served
        self._measured_bytes = 0

    def beside(self, peak_bytes: int) -> int:
        """Return the bytes that a step reserves in addition to its tensors, if they take `peak_bytes` at their peak."""
        if self._memory is None:
            return 0
        if self._served().wanted:
            return max(self._measured_bytes, self._memory.holes_bytes)
        reserved_bytes, allocated_bytes = self._cached_share()
        return max(0, reserved_bytes - allocated_bytes) * peak_bytes // allocated_bytes

    def largest_peak(self, device_bytes: int) -> int:
        """Return the largest peak of tensors, in bytes, at which a step reserves no more than `device_bytes`."""
        if self._memory is None:
            return device_bytes
        if self._served().wanted:
            return max(0, device_bytes - self.beside(device_bytes))
        reserved_bytes, allocated_bytes = self._cached_share()
        return device_bytes * allocated_bytes // max(reserved_bytes, allocated_bytes)

    def measure(self, peak_bytes: int) -> int | None:
        """Measure what the step that ended reserved in addition to its tensors, for `beside`.

        Args:
            peak_bytes: bytes of the step's tensors at their peak.

        Returns:
            The bytes reserved now; None if the arena did not serve the whole step, which then says nothing about later
            steps.
        """
        if self._memory is None or not self._served().whole:
            return None
        reserved_bytes = self._memory.reserved_bytes
        self._measured_bytes = max(self._measured_bytes, reserved_bytes - peak_bytes)
        return reserved_bytes

    def _cached_share(self) -> tuple[int, int]:
        """Return the largest numbers of bytes in the run so far: reserved by torch's allocator, and in tensors."""
        return self._memory.reserved_peak_bytes, max(self._memory.allocated_peak_bytes, 1)
