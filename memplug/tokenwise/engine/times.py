"""Device timestamps of one forward's operators, for the planner."""

from __future__ import annotations

from typing import Any

from memplug.device.device import Device
from memplug.tokenwise.engine.calls import TimesCalls
from memplug.tokenwise.engine.tape import Tape


class Times(TimesCalls):
    """The timestamps of one timed forward.

    Attributes:
        device: the device that trains.
        tape: the forward's tape with the timestamps; None until the forward is over.
    """

    def __init__(self, device: Device):
        self.device = device
        self.tape: Tape | None = None
        self._begin: Any = None
        self._stamps: list[Any] = []

    def begin(self) -> None:
        """Take the time at which the forward begins, after earlier regions have made room for it."""
        self._begin = self.device.stamp()

    def time(self, index: int, over: bool) -> None:
        """Take the time at which an operator begins or ends."""
        stamp = self.device.stamp()
        if over:
            self._stamps[index] = (self._stamps[index], stamp)
        else:
            self._stamps.append(stamp)

    def close(self, frame: Any) -> Tape:
        """Take the time at which the forward ends, and return its tape."""
        self.tape = Tape(frame)
        self.tape.stamps, self.tape.span = self._stamps, (self._begin, self.device.stamp())
        return self.tape

    def begin_backward(self) -> None:
        """Take the time at which backward first asks for a saved tensor."""
        if self.tape is not None and self.tape.backward_begin is None:
            self.tape.backward_begin = self.device.stamp()
