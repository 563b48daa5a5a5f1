"""The cost of memplug's own work is part of a plan's predicted time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplug.device.host_time import HostTime
from memplug.tokenwise import host_time
from memplug.tokenwise.plan import plain
from memplug.tokenwise.plan import solver as plan
from tests.support.plans import BUDGET, REGION

COSTS = HostTime(launch_s=10.0, observe_s=2.0, time_s=3.0, region_s=50.0, restore_s=40.0)


def test_host_time_is_measured_once_and_not_negative() -> None:
    measured = host_time.measure()
    assert measured is host_time.measure()
    assert 0 < measured.launch_s < 1e-3
    assert all(0 <= getattr(measured, name) < 1e-2 for name in HostTime.__slots__)


def test_forward_time_excludes_observing_and_timing() -> None:
    """In this step memplug observed and timed a hundred operators."""
    assert COSTS.forward_s(100, span_s=2000.0, busy_s=1200.0) == 2000 - 100 * 5 - 50
    assert COSTS.forward_s(100, span_s=2000.0, busy_s=1900.0) == 1900, "the device was busy all the time"


def test_cpu_counts_all_host_time_and_a_gpu_only_its_exposed_part() -> None:
    assert COSTS.overhead_s(100, 1500.0, 3000.0, waits=False) == (250, 40)
    assert COSTS.overhead_s(100, 5000.0, 9000.0, waits=True) == (0, 0), "kernels take longer than their launches"
    assert COSTS.overhead_s(100, 1100.0, 1010.0, waits=True) == (150, 30)
    assert COSTS.overhead_s(100, 100.0, 100.0, waits=True) == (250, 40), "the device waits for every launch"


def test_host_time_lengthens_every_plan_that_is_not_plain() -> None:
    costly = replace(REGION, overhead_forward_s=0.5, overhead_backward_s=0.25)
    for solve in (plan.solve, plan.full_recomputation):
        assert solve([costly], BUDGET).step_s >= solve([REGION], BUDGET).step_s
    recomputed = plan.full_recomputation([costly], BUDGET)
    assert recomputed.step_s == pytest.approx(plan.full_recomputation([REGION], BUDGET).step_s + 4 * 0.75)
    everything = plain.solve([costly], BUDGET)
    assert everything is not None and everything.step_s == 4 * 3.0
    half = replace(BUDGET, device_bytes=200, d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9)
    partly, none = (plain.solve_partly([region], half) for region in (costly, REGION))
    assert partly is not None and none is not None and partly.step_s == pytest.approx(none.step_s + 2 * 0.75)


def test_plan_with_host_time_is_no_slower_than_fixed_fractions() -> None:
    costly = replace(REGION, overhead_forward_s=30.0, overhead_backward_s=10.0, input_bytes=20)
    best = plan.solve([costly], replace(BUDGET, device_bytes=0))
    assert all(
        best.step_s <= plan.solve([costly], replace(BUDGET, device_bytes=0), a).step_s + 1e-9 for a in (0.0, 1.0)
    )
