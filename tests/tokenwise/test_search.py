"""The gen-policy stage measures the tried plans and keeps the best."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memplug.session.session import Session
from memplug.session.table import Stage
from memplug.tokenwise.planning import StepObserver
from memplug.tokenwise.search import Trial, choose
from tests.support.stepping import Led, led, plans_by_alpha

__all__ = ["plans_by_alpha"]

TRIALS = st.builds(Trial, st.floats(0.001, 10), st.booleans(), st.integers(0, 5))


def trial(seconds: float, fits: bool = True, device_bytes: int = 0) -> Trial:
    return Trial(seconds, fits, device_bytes)


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_plan_that_is_fastest_on_its_slowest_rank_is_chosen() -> None:
    assert choose([[trial(3.0), trial(1.0), trial(2.0)]]) == (1, True)
    assert choose([[trial(3.0), trial(1.0), trial(2.0)], [trial(3.0), trial(9.0), trial(2.0)]]) == (2, True)


def test_plan_that_does_not_fit_on_one_rank_is_not_chosen() -> None:
    assert choose([[trial(1.0), trial(2.0)], [trial(1.0, fits=False), trial(2.0)]]) == (1, True)


def test_first_plan_that_keeps_least_is_chosen_if_none_fits() -> None:
    out = [trial(1.0, False, 9), trial(5.0, False, 3), trial(0.1, False, 3)]
    assert choose([out]) == (1, False)
    assert choose([out, [trial(1.0, True, 0), trial(1.0, True, 9), trial(1.0, True, 1)]]) == (2, False)


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(TRIALS, min_size=n, max_size=n), min_size=1, max_size=4)))
def test_chosen_plan_is_the_fastest_that_fits(trials: list[list[Trial]]) -> None:
    chosen, fits = choose(trials)
    by_plan = list(zip(*trials, strict=True))
    fitting = [ranks for ranks in by_plan if all(one.fits for one in ranks)]
    assert fits == bool(fitting)
    if fits:
        slowest = [max(one.seconds for one in ranks) for ranks in fitting]
        assert by_plan[chosen] in fitting and max(one.seconds for one in by_plan[chosen]) == min(slowest)


# -- measuring ---------------------------------------------------------------------------------------------------------


class Clock:
    """A clock on which seconds pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Yield the clock that every device reads."""
    made = Clock()
    monkeypatch.setattr("memplug.device.device.Device.now_s", lambda device: made.now)
    return made


@contextlib.contextmanager
def paced(clock: Clock, tries: int = 4) -> Iterator[Led]:
    """Run a session in which a step is faster the more rows a region's plan swaps.

    The plan with alpha 0.5 is tried first, the one with alpha 1 third.
    """
    with led(layers=2, policy_steps=tries) as run:
        region = run.session._attached.regions[0]

        def pass_time(module: nn.Module, inputs: Any, output: Any) -> None:
            clock.now += 1.0 - 0.5 * region.setting.rows

        run.model.register_forward_hook(pass_time)
        yield run


def test_plan_with_the_shortest_step_stays(plans_by_alpha: None, clock: Clock) -> None:
    with paced(clock) as run:
        run.reach_stable()
        assert run.plans[4] == [region.setting for region in run.session._attached.regions]
        assert all(fraction == 1.0 for _, fraction, _ in run.session._attached.regions[0].setting.plan.values())
        assert "plan 3 of 4 tried" in run.session.history[-1][3]
        assert run.session.report().tokenwise.swapped_fraction == run.session._attached.regions[0].setting.rows


def test_step_time_excludes_work_between_steps(plans_by_alpha: None, clock: Clock) -> None:
    with paced(clock) as run:

        def write_monitor(session: Session) -> None:
            clock.now += 100.0 if session.steps in (4, 5) else 0.0  # around the third plan's step

        run.session.on_step.append(write_monitor)
        run.reach_stable()
        assert "plan 3 of 4 tried" in run.session.history[-1][3]


@pytest.mark.parametrize(("refused", "stays"), [(1, 3), (2, 3), (3, 1)])
def test_plan_for_which_host_memory_runs_out_does_not_stay(
    refused: int, stays: int, plans_by_alpha: None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third plan is the fastest, and the first is the next fastest."""
    with paced(clock) as run:
        run.step(times=1 + refused)
        transfer = type(run.session._attached.executor.transfer)
        counted = transfer.refused.fget
        monkeypatch.setattr(transfer, "refused", property(lambda each: counted(each) + 1))
        run.reach_stable()
        assert f"plan {stays} of 4 tried" in run.session.history[-1][3]


def peaks(run: Led, *by_step: int | None) -> None:
    """Set the device's peaks: of the observed step, and of each step that tries a plan."""
    run.recorder.peaks = list(by_step)


@pytest.mark.parametrize(("third", "stays"), [(1019, 3), (1021, 1), (None, 3)])
def test_plan_that_exceeds_its_predicted_peak_does_not_stay(
    third: int | None, stays: int, plans_by_alpha: None, clock: Clock
) -> None:
    """No plan keeps outputs, so each predicts the observed step's peak; 2 % more are tolerated."""
    with paced(clock) as run:
        peaks(run, 1000, 1000, 900, third, 1000)
        run.reach_stable()
        assert f"plan {stays} of 4 tried" in run.session.history[-1][3]
        assert run.session.report().tokenwise.predicted_peak_bytes == 1000


def test_first_plan_stays_with_a_warning_if_all_exceed_their_peak(
    plans_by_alpha: None, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with paced(clock, tries=3) as run, caplog.at_level(logging.WARNING, "memplug"):
        peaks(run, 1000, 2000, 2000, 2000)
        run.reach_stable()
        assert caplog.text.count("more memory than it should have") == 1
        assert "plan 1 of 3 tried" in run.session.history[-1][3]


def test_host_memory_of_all_plans_is_pinned_before_the_first_trial(
    plans_by_alpha: None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memplug.device.host_pool.SMALLEST_SLAB_BYTES", 1)
    with paced(clock, tries=3) as run:
        run.step(times=2)
        before_bytes = run.session.report().tokenwise.host_pool_bytes
        run.reach_stable()
        assert "plan 3 of 3 tried" in run.session.history[-1][3], "the plan that swaps most"
        assert before_bytes >= run.session.report().tokenwise.predicted_host_bytes > 0


def test_plan_counts_the_forwards_in_flight_of_its_own_program() -> None:
    """The first program has two graphs in flight, and the second has one."""
    with led() as run:
        model = run.model
        inner = model.forward
        model.forward = lambda x: inner(x) + inner(x)
        run.reference.forward = lambda x, call=run.reference.forward: call(x) + call(x)
        run.reach_stable(6)
        assert instances(run) == 6
        del model.forward, run.reference.forward
        run.step(6, times=2)
        run.reach_stable(6)
        # not 3: the last layer's tensors are still on the device when its backward needs them
        assert instances(run) == 2 and run.session.report().replans == 2


def instances(run: Led) -> int:
    return sum(group.instances for region in run.session.solution.regions.values() for group in region.groups)


def test_tapes_of_the_observed_step_are_released() -> None:
    def full() -> list[StepObserver]:
        gc.collect()
        return [each for each in gc.get_objects() if isinstance(each, StepObserver) and each.tapes]

    before = full()  # of other tests
    with led() as run:
        run.reach_stable()
        assert run.session.stage is Stage.STABLE
        assert len(full()) <= len(before)
