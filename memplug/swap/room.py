"""How much of the device a step may have in use under a swap list."""

from __future__ import annotations

from typing import Literal

from memplug.device.capacity import device_bytes
from memplug.device.device import Device
from memplug.device.reserved import Reserved
from memplug.profile.trace import Trace
from memplug.sizes import GIB
from memplug.swap.plan.from_trace import held_bytes

TIGHTER = 3  # times at most that a list is made anew for less memory, since a step under it took more than it says


class Room:
    """The budget, less what lists leave free: memory that a collective holds is free a little sooner or later in every
    step, and a step that repeats is not seen in time to be helped (memplug/swap/native/repeated_step.h).

    Args:
        asked_gib: the block's "device_budget_gib".
        device: that trains.
        reserved: beside the tensors of a step.
    """

    def __init__(self, asked_gib: float | Literal["auto"], device: Device, reserved: Reserved):
        self._asked_gib, self._device, self._reserved = asked_gib, device, reserved
        self.forget()

    def forget(self) -> None:
        """The next list is another program's."""
        self._left_bytes = self._more_bytes = self._tightened = 0
        self._leaves_any = True

    @property
    def budget_bytes(self) -> int | None:
        """What a step may have asked for at a time; None: nothing was set on the CPU.

        A number counts as it is; of what the device has, what is reserved beside tensors does not.
        """
        asked_gib = self._asked_gib
        if self._device.memory is None:
            return device_bytes(asked_gib, self._device)
        room_bytes = self._reserved.largest_peak(device_bytes("auto", self._device))
        return room_bytes if asked_gib == "auto" else min(int(asked_gib * GIB), room_bytes)

    def holds(self, was_short: bool) -> bool:
        """Whether a step fits without a list: no request has failed, and the device's own count of what was in use at
        most says so; on the CPU the limit has.
        """
        if was_short or self._device.memory is None:
            return not was_short
        return self._device.memory.allocated_peak_bytes <= self.budget_bytes

    def of_list(self, step: Trace) -> int:
        """Bytes that a list for a recorded step has to keep to."""
        self._left_bytes = held_bytes(step) + self._more_bytes if self._leaves_any else 0
        return self.budget_bytes - self._left_bytes

    def tighten(self, nbytes: int) -> bool:
        """A step under a list lacked so many bytes: whether the next one is to leave them free as well."""
        if not nbytes or self._tightened == TIGHTER:
            return False
        self._tightened += 1
        self._more_bytes += nbytes
        return True

    def loosen(self) -> bool:
        """There is no list that leaves so much: whether the next one, which leaves nothing, takes more. Rather a slow
        step under one than none.
        """
        self._leaves_any, self._tightened = False, TIGHTER
        return self._left_bytes > 0
