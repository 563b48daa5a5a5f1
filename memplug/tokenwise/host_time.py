"""What memplug's own work costs: processor time for each operator and each region, measured on this machine once.

A chain of operators on one number, of two lengths, is run as without memplug, as a region, and as a region with times
around its operators, as in the step that plans are made from. The shorter chain tells what a region costs, the
difference what an operator does.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from memplug.device.device import Device
from memplug.tokenwise.regions.executor import Executor
from memplug.tokenwise.regions.region import Region

SHORT, LONG = 16, 80  # operators
REPEATS = 9


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


@functools.cache
def measure() -> HostTime:
    """Takes some 50 ms, on the CPU's device, whatever the training's is."""
    executor = Executor(Device(), host_budget_bytes=0)
    try:
        with torch.enable_grad():
            alone, observed, timed = (
                [_chain(executor, operators, mode) for operators in (SHORT, LONG)]
                for mode in ("alone", "observed", "timed")
            )
    finally:
        executor.close()
    launch_s, observe_s, time_s = (_slope(part, 0) for part in (alone, observed, timed))
    return HostTime(
        launch_s=launch_s,
        observe_s=max(0.0, observe_s - launch_s),
        time_s=max(0.0, time_s - observe_s),
        region_s=max(0.0, observed[0][0] - alone[0][0] - SHORT * (observe_s - launch_s)),
        restore_s=max(0.0, observed[0][1] - alone[0][1] - SHORT * (_slope(observed, 1) - _slope(alone, 1))),
    )


def _chain(executor: Executor, operators: int, mode: str) -> tuple[float, float]:
    """Seconds of a chain's forward and of its backward."""

    def call(x: torch.Tensor) -> torch.Tensor:
        for _ in range(operators):
            x = x.sin()
        return x

    region = Region("chain", "Chain")
    run: Callable[[torch.Tensor], torch.Tensor] = (
        call if mode == "alone" else lambda x: executor.run(region, call, (x,), {})
    )
    executor.time_forwards((lambda *_: None) if mode == "timed" else None)
    x = torch.ones(1, device="cpu", requires_grad=True)
    taken = []
    for _ in range(REPEATS + 2):
        begin = time.perf_counter()
        y = run(x)
        between = time.perf_counter()
        y.backward()
        taken.append((between - begin, time.perf_counter() - between))
    forwards, backwards = zip(*taken[2:], strict=True)  # the first ones make the tape
    return median(forwards), median(backwards)


def _slope(chains: list[tuple[float, float]], part: int) -> float:
    (short, long) = chains
    return (long[part] - short[part]) / (LONG - SHORT)
