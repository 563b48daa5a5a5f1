"""Measures the cost of memplug's own work: CPU time per operator and per region, on this machine, once.

Two chains of operators, a short and a long one, run on a tensor of one element in three ways: without memplug; as a
region; and as a region whose operators are timed, as in the step that plans are made from. The short chain gives the
cost of a region. The difference between the chains gives the cost of an operator.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from statistics import median

import torch

from memplug.device.device import Device
from memplug.device.host_time import HostTime
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.region import Region

SHORT, LONG = 16, 80  # number of operators in each chain
REPEATS = 9


@functools.cache
def measure() -> HostTime:
    """Measure host times on the CPU, whichever device trains; this takes about 50 ms."""
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
    """Return the median seconds of a chain's forward, and of its backward."""

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
    forwards, backwards = zip(*taken[2:], strict=True)  # not the first two runs: they make the tape
    return median(forwards), median(backwards)


def _slope(chains: list[tuple[float, float]], part: int) -> float:
    (short, long) = chains
    return (long[part] - short[part]) / (LONG - SHORT)
