"""Device bytes that a step may use under a swap list."""

from __future__ import annotations

from typing import Literal

from memplug.device.capacity import device_bytes
from memplug.device.device import Device
from memplug.device.reserved import Reserved
from memplug.profile.trace import Trace
from memplug.sizes import GIB
from memplug.swap.plan.from_trace import held_bytes

TIGHTER = 3  # times that a list may be made again for less memory, because a step under it exceeded its prediction


class ListRoom:
    """The device budget, less the bytes that lists leave free.

    A list leaves bytes free for two reasons. Memory that a collective holds is freed a little earlier or later in every
    step. And a step that is followed by its requests alone may run short too early for tensors to be offloaded in time
    (memplug/swap/native/repeated_step.h).

    Args:
        asked_gib: the block's "device_budget_gib".
        device: the device that trains.
        reserved: memory that the allocator reserves beside a step's tensors.
    """

    def __init__(self, asked_gib: float | Literal["auto"], device: Device, reserved: Reserved):
        self._asked_gib, self._device, self._reserved = asked_gib, device, reserved
        self.forget()

    def forget(self) -> None:
        """Forget earlier lists: the next list is another program's."""
        self._left_bytes = self._more_bytes = self._tightened = 0
        self._leaves_any = True

    @property
    def budget_bytes(self) -> int | None:
        """Return the bytes that a step may have allocated at once; None: on the CPU, with no limit set.

        A number in the block counts, up to the device's capacity less the memory reserved beside tensors.
        """
        asked_gib = self._asked_gib
        if self._device.memory is None:
            return device_bytes(asked_gib, self._device)
        room_bytes = self._reserved.largest_peak(device_bytes("auto", self._device))
        return room_bytes if asked_gib == "auto" else min(int(asked_gib * GIB), room_bytes)

    def holds(self, was_short: bool) -> bool:
        """Return whether a step fits without a list.

        It fits if no request failed and the peak that the device's allocator counted is within the budget; on the CPU,
        whose limit makes requests fail, if no request failed.
        """
        if was_short or self._device.memory is None:
            return not was_short
        return self._device.memory.allocated_peak_bytes <= self.budget_bytes

    def of_list(self, step: Trace) -> int:
        """Return the bytes that a list for a recorded step must keep to."""
        self._left_bytes = held_bytes(step) + self._more_bytes if self._leaves_any else 0
        return self.budget_bytes - self._left_bytes

    def tighten(self, nbytes: int) -> bool:
        """Let the next list leave `nbytes` more free, since a step lacked them; return whether to make one."""
        if not nbytes or self._tightened == TIGHTER:
            return False
        self._tightened += 1
        self._more_bytes += nbytes
        return True

    def loosen(self) -> bool:
        """Let the next list leave nothing free, since none can leave this much; return whether that changes anything.

        A list under which a step is slow is better than no list.
        """
        self._leaves_any, self._tightened = False, TIGHTER
        return self._left_bytes > 0
