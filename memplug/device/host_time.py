"""The host time that memplug's own work takes in a training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostTime:
    """Host time of parts of a training step, in seconds: `launch_s` is torch's, the others are memplug's.

    Attributes:
        launch_s: time to launch an operator of a forward without memplug.
        observe_s: added time for each operator of a region.
        time_s: added time, beyond `observe_s`, for an operator with device timestamps around it.
        region_s: added time for a region's forward, besides that of its operators.
        restore_s: added time for a region's backward and recompute pass, besides the pass's operators.
    """

    launch_s: float
    observe_s: float
    time_s: float
    region_s: float
    restore_s: float

    def forward_s(self, operators: int, span_s: float, busy_s: float) -> float:
        """Return the seconds that a forward would take without memplug.

        Args:
            operators: number of operators in the forward.
            span_s: measured time from the first to the last operator of a region, with timestamps around operators.
            busy_s: sum of the operators' times between these timestamps.
        """
        return max(busy_s, span_s - operators * (self.observe_s + self.time_s) - self.region_s)

    def overhead_s(self, operators: int, forward_s: float, backward_s: float, waits: bool) -> tuple[float, float]:
        """Return the seconds by which memplug prolongs a region's forward and its backward.

        Args:
            operators: number of operators in the forward.
            forward_s: duration of the forward without memplug.
            backward_s: duration of the backward without memplug.
            waits: True if the host queues operators, so that the device idles only if it is faster than the host.
        """
        observed_s = operators * self.observe_s + self.region_s
        if not waits:
            return observed_s, self.restore_s
        launched_s = operators * self.launch_s
        return (
            max(0.0, launched_s + observed_s - max(forward_s, launched_s)),
            max(0.0, launched_s + self.restore_s - max(backward_s, launched_s)),
        )
