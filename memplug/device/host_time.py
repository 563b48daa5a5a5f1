"""What memplug's own work takes of the host, and what a training step has of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostTime:
    """Seconds of the host's time.

    Attributes:
        launch_s: an operator of a forward, as without memplug.
        observe_s: more for an operator of a region.
        time_s: more again where device times are taken around it.
        region_s: more for a region's forward, whatever it runs.
        restore_s: more for a region's backward, with its recompute pass, less the operators that this runs.
    """

    launch_s: float
    observe_s: float
    time_s: float
    region_s: float
    restore_s: float

    def forward_s(self, operators: int, span_s: float, busy_s: float) -> float:
        """A forward without memplug.

        Args:
            operators: how many it runs.
            span_s: from its first to its last one, as a region with times around its operators.
            busy_s: the sum of these times.
        """
        return max(busy_s, span_s - operators * (self.observe_s + self.time_s) - self.region_s)

    def overhead_s(self, operators: int, forward_s: float, backward_s: float, waits: bool) -> tuple[float, float]:
        """How much longer memplug makes a region's forward, and its backward.

        Args:
            operators: how many its forward runs.
            forward_s, backward_s: without memplug.
            waits: the device computes while the host launches what follows, and waits only where it is the faster.
        """
        observed_s = operators * self.observe_s + self.region_s
        if not waits:
            return observed_s, self.restore_s
        launched_s = operators * self.launch_s
        return (
            max(0.0, launched_s + observed_s - max(forward_s, launched_s)),
            max(0.0, launched_s + self.restore_s - max(backward_s, launched_s)),
        )
