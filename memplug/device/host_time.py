"""The host's time that memplug's own work takes in a training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostTime:
    """The host's time for parts of a training step, in seconds; all but `launch_s` are added by memplug.

    Attributes:
        launch_s: time for an operator of a forward without memplug.
        observe_s: added time for an operator of a region.
        time_s: added time for an operator that is surrounded by device timestamps, beyond `observe_s`.
        region_s: added time for a region's forward, beyond that of its operators.
        restore_s: added time for a region's backward with its recompute pass, without the pass's operators.
    """

    launch_s: float
    observe_s: float
    time_s: float
    region_s: float
    restore_s: float

    def forward_s(self, operators: int, span_s: float, busy_s: float) -> float:
        """Return the duration of a forward without memplug, in seconds.

        Args:
            operators: number of operators in the forward.
            span_s: time from the first to the last operator, when it ran as a region with timestamps around operators.
            busy_s: sum of the times between these timestamps.
        """
        return max(busy_s, span_s - operators * (self.observe_s + self.time_s) - self.region_s)

    def overhead_s(self, operators: int, forward_s: float, backward_s: float, waits: bool) -> tuple[float, float]:
        """Return by how much memplug prolongs a region's forward and its backward, in seconds.

        Args:
            operators: number of operators in the forward.
            forward_s: duration of the forward without memplug.
            backward_s: duration of the backward without memplug.
            waits: True if the device computes while the host launches later operators, and waits only if the device is
                faster than the host.
        """
        observed_s = operators * self.observe_s + self.region_s
        if not waits:
            return observed_s, self.restore_s
        launched_s = operators * self.launch_s
        return (
            max(0.0, launched_s + observed_s - max(forward_s, launched_s)),
            max(0.0, launched_s + self.restore_s - max(backward_s, launched_s)),
        )
