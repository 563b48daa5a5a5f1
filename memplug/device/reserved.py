"""The overhead of a step: the device memory that it reserves beyond the bytes of its tensors.

Plans leave room for the overhead in their budget. With the arena, memplug measures the overhead once the arena has
served a whole step. Until then memplug counts only the holes in those segments of torch's allocator that hold tensors
from step to step. The allocator's cache does not count: the allocator empties it when the device is full, so steps
before the arena serves may take longer, but they fit.

Without the arena the overhead is the cache of torch's allocator.
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
        whole: True if the arena served the whole of the latest step.
    """

    wanted: bool = False
    whole: bool = False


class Reserved:
    """Measures and predicts the overhead of a session's steps.

    Args:
        memory: the device's counters; None if the device has none: then the overhead is 0.
        served: returns how the arena served the latest step.
    """

    def __init__(self, memory: DeviceMemory | None, served: Callable[[], Served] = Served):
        self._memory, self._served = memory, served
        self._measured_bytes = 0

    def beside(self, peak_bytes: int) -> int:
        """Return the overhead, in bytes, of a step whose tensors take `peak_bytes` at their peak."""
        if self._memory is None:
            return 0
        if self._served().wanted:
            return max(self._measured_bytes, self._memory.holes_bytes)
        reserved_bytes, allocated_bytes = self._cached_share()
        return max(0, reserved_bytes - allocated_bytes) * peak_bytes // allocated_bytes

    def largest_peak(self, device_bytes: int) -> int:
        """Return the largest peak of a step's tensors, in bytes, that with its overhead fits into `device_bytes`."""
        if self._memory is None:
            return device_bytes
        if self._served().wanted:
            return max(0, device_bytes - self.beside(device_bytes))
        reserved_bytes, allocated_bytes = self._cached_share()
        return device_bytes * allocated_bytes // max(reserved_bytes, allocated_bytes)

    def measure(self, peak_bytes: int) -> int | None:
        """Measure the overhead of the latest step, for `beside`.

        Args:
            peak_bytes: bytes of the step's tensors at their peak.

        Returns:
            The bytes reserved now. None if the arena did not serve the whole step, which then does not show the
            overhead of later steps.
        """
        if self._memory is None or not self._served().whole:
            return None
        reserved_bytes = self._memory.reserved_bytes
        self._measured_bytes = max(self._measured_bytes, reserved_bytes - peak_bytes)
        return reserved_bytes

    def _cached_share(self) -> tuple[int, int]:
        """Return the peaks of the run so far, in bytes: (reserved by torch's allocator, held by tensors)."""
        return self._memory.reserved_peak_bytes, max(self._memory.allocated_peak_bytes, 1)
