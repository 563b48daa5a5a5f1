"""The forwards whose graphs are alive, of all regions of one executor."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplug.execute.frame import Frame


class InFlight:
    """A frame dies with its graph, on any thread and at any time: what it leaves is counted at the next look.

    Args:
        ledger: of the executor.

    Attributes:
        forwards: that there have been.
        peak: the most in flight at once, by region name.
        peak_input_bytes: the most of `input_bytes`.
    """

    def __init__(self, ledger: Any):
        self._ledger = ledger
        self.forwards = 0
        self.peak: collections.Counter[str] = collections.Counter()
        self.peak_input_bytes = 0
        self._live: collections.Counter[str] = collections.Counter()
        self._input_bytes = 0
        self._dead: collections.deque[tuple[str, int, int, int]] = collections.deque()

    def born(self, frame: Frame) -> None:
        """A forward begins."""
        self.settle()
        name = frame.region.name
        self.forwards += 1
        self._live[name] += 1
        self.peak[name] = max(self.peak[name], self._live[name])

    def over(self, frame: Frame) -> None:
        """It is over."""
        self._input_bytes += frame.input_bytes
        self.peak_input_bytes = max(self.peak_input_bytes, self.input_bytes)

    def died(self, frame: Frame, recomputed_bytes: int) -> None:
        """Its graph is gone; `recomputed_bytes` are on the ledger that backward did not take."""
        input_bytes = frame.input_bytes if frame.is_over else 0
        self._dead.append((frame.region.name, input_bytes, len(frame.todo), recomputed_bytes))

    @property
    def count(self) -> int:
        """How many there are."""
        self.settle()
        return self._live.total()

    @property
    def input_bytes(self) -> int:
        """Bytes of their swapped region inputs."""
        self.settle()
        return self._input_bytes

    def settle(self) -> None:
        """Count those that died."""
        while self._dead:
            name, input_bytes, waiting, recomputed_bytes = self._dead.popleft()
            self._live[name] -= 1
            self._input_bytes -= input_bytes
            self._ledger.waiting -= waiting
            self._ledger.recomputed_bytes -= recomputed_bytes
