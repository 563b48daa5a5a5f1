"""Device bytes that a step may use under a swap list."""

from __future__ import annotations

from typing import Literal

from memplug.device.capacity import device_bytes
from memplug.device.device import Device
from memplug.device.reserved import Reserved
from memplug.profile.trace import Trace
from memplug.sizes import GIB
from memplug.swap.plan.from_trace import held_bytes

TIGHTER = 3  # how often memplug may make a new list with a smaller budget, because a step lacked memory


class ListRoom:
    """The device budget, and the smaller one that a list must keep to, since a list leaves some bytes free.

    A list leaves bytes free for two reasons. First, steps free a collective's memory at slightly different times.
    Second, a step under a list may lack memory: when memplug follows the step by its requests alone
    (memplug/swap/native/repeated_step.h), it cannot always offload tensors in time. The next list then leaves as many
    more bytes free as that step lacked.

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
        """Return the most bytes that a step may have allocated at once; None on the CPU if no limit is set.

        On a GPU this is at most what "auto" grants, less the memory that the allocator reserves beside tensors.
        """
        asked_gib = self._asked_gib
        if self._device.memory is None:
            return device_bytes(asked_gib, self._device)
        room_bytes = self._reserved.largest_peak(device_bytes("auto", self._device))
        return room_bytes if asked_gib == "auto" else min(int(asked_gib * GIB), room_bytes)

    def holds(self, was_short: bool) -> bool:
        """Return whether a step fits without a list.

        It fits if no request failed (`was_short` is false) and, on a GPU, the allocator's peak is within the budget. On
        the CPU the limit itself makes requests fail.
        """
        if was_short or self._device.memory is None:
            return not was_short
        return self._device.memory.allocated_peak_bytes <= self.budget_bytes

    def of_list(self, step: Trace) -> int:
        """Return the device bytes that a list for this recorded step must keep to."""
        self._left_bytes = held_bytes(step) + self._more_bytes if self._leaves_any else 0
        return self.budget_bytes - self._left_bytes

    def tighten(self, nbytes: int) -> bool:
        """Let the next list leave `nbytes` more free, the bytes that a step lacked.

        Returns:
            Whether to make such a list: False if the step lacked nothing, or after `TIGHTER` lists.
        """
        if not nbytes or self._tightened == TIGHTER:
            return False
        self._tightened += 1
        self._more_bytes += nbytes
        return True

    def loosen(self) -> bool:
        """Let the next list leave nothing free, since no list could leave enough free.

        A list under which steps sometimes lack memory, and are slow, is better than no list.

        Returns:
            Whether this raises the budget of the next list.
        """
        self._leaves_any, self._tightened = False, TIGHTER
        return self._left_bytes > 0
