"""What a step reserves of the device beside its tensors, for all that plans to a budget.

With the arena that is what the arena is taller than they are, which is known once it serves, and the holes in segments
of torch's allocator, which hold what stays from step to step. Without it, it is what that allocator caches. Steps
before the arena serves run on that allocator too, which then empties its cache where the device has no more: they take
longer, and no more than there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memplug.device.memory import DeviceMemory


@dataclass(frozen=True, slots=True)
class Served:
    """What the arena does for the session's steps.

    Attributes:
        wanted: it serves them, or will.
        whole: it served all of the step that ended last.
    """

    wanted: bool = False
    whole: bool = False


class Reserved:
    """Of one session's steps.

    Args:
        memory: of the device; None: it does not count, and nothing is reserved beside tensors.
        served: of the step that ended last.
    """

    def __init__(self, memory: DeviceMemory | None, served: Callable[[], Served] = Served):
        self._memory, self._served = memory, served
        self._measured_bytes = 0

    def beside(self, peak_bytes: int) -> int:
        """Returns the bytes that a step with that largest allocation total reserves, and no tensor has."""
        if self._memory is None:
            return 0
        if self._served().wanted:
            return max(self._measured_bytes, self._memory.holes_bytes)
        reserved_bytes, allocated_bytes = self._cached_share()
        return max(0, reserved_bytes - allocated_bytes) * peak_bytes // allocated_bytes

    def largest_peak(self, device_bytes: int) -> int:
        """Returns the largest allocation total of a step that reserves no more than that."""
        if self._memory is None:
            return device_bytes
        if self._served().wanted:
            return max(0, device_bytes - self.beside(device_bytes))
        reserved_bytes, allocated_bytes = self._cached_share()
        return device_bytes * allocated_bytes // max(reserved_bytes, allocated_bytes)

    def measure(self, peak_bytes: int) -> int | None:
        """Returns what is reserved now, after a step with that largest allocation total; None: the arena did not serve
        all of it, which says nothing of later ones.
        """
        if self._memory is None or not self._served().whole:
            return None
        reserved_bytes = self._memory.reserved_bytes
        self._measured_bytes = max(self._measured_bytes, reserved_bytes - peak_bytes)
        return reserved_bytes

    def _cached_share(self) -> tuple[int, int]:
        """What torch's allocator had reserved at most in the run so far, and how much of that tensors had."""
        return self._memory.reserved_peak_bytes, max(self._memory.allocated_peak_bytes, 1)
