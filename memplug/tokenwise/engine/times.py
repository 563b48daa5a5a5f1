"""When what of one forward ran, for the planner."""

from __future__ import annotations

from typing import Any

from memplug.device.device import Device
from memplug.tokenwise.engine.calls import TimesCalls
from memplug.tokenwise.engine.tape import Tape


class Times(TimesCalls):
    """Of one timed forward; `tape` has them once it is over."""

    def __init__(self, device: Device):
        self.device = device
        self.tape: Tape | None = None
        self._begin: Any = None
        self._stamps: list[Any] = []

    def begin(self) -> None:
        """The forward begins: there is room, and its inputs are on their way."""
        self._begin = self.device.stamp()

    def time(self, index: int, over: bool) -> None:
        """An operator begins, or is over."""
        stamp = self.device.stamp()
        if over:
            self._stamps[index] = (self._stamps[index], stamp)
        else:
            self._stamps.append(stamp)

    def close(self, frame: Any) -> Tape:
        """The forward is over: its tape, for the planner."""
        self.tape = Tape(frame)
        self.tape.stamps, self.tape.span = self._stamps, (self._begin, self.device.stamp())
        return self.tape

    def begin_backward(self) -> None:
        """Backward asks for a saved tensor."""
        if self.tape is not None and self.tape.backward_begin is None:
            self.tape.backward_begin = self.device.stamp()
