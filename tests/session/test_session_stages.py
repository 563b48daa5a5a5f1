"""A session that adapts: warm-up, gen-policy, stable, and back when the program changes (Chameleon, Algorithm 1).

Every step of every test trains a twin without memplug beside it: losses and gradients agree through all stages.
"""

from __future__ import annotations

import itertools
import logging

import pytest

import memplug
from memplug.session import adjuster as adjuster_module
from memplug.session.table import Stage
from tests.support.blocks import LAYERS, Stack
from tests.support.hosts import block
from tests.support.stepping import Led, Played, is_safest, led, plans_by_alpha, played, settings

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("keeps_nothing")]

__all__ = ["plans_by_alpha"]

WARM_UP, GEN_POLICY, STABLE = Stage.WARM_UP, Stage.GEN_POLICY, Stage.STABLE
ONE = [*range(200)] * 3
OTHER = [*range(500, 700)] * 3


# -- to a plan ---------------------------------------------------------------------------------------------------------


SOME = [(0, 0), (0, 3), (1, 1), (2, 2)]
REST = [pair for pair in itertools.product([0, 1, 2], [0, 1, 2, 3]) if pair not in SOME]


@pytest.mark.parametrize(("m", "n"), [*SOME, *(pytest.param(*pair, marks=pytest.mark.long) for pair in REST)])
def test_warm_up_takes_m_plus_one_steps_then_n_plans_are_tried(m: int, n: int, plans_by_alpha: None) -> None:
    with led(warmup_steps=m, policy_steps=n) as run:
        run.step(times=m + n + 6)
        tried = n if n > 1 else 0  # a single plan is not compared with others
        assert run.stages == [WARM_UP] * m + [GEN_POLICY] * (1 + tried) + [STABLE] * (5 + n - tried)
        assert run.session.report().replans == 1


def test_each_plan_runs_for_one_step_and_one_stays_in_force(plans_by_alpha: None) -> None:
    with led(policy_steps=4) as run:
        run.step(times=9)
        rows = [plan[0].rows for plan in run.plans]
        whole_rows = [0.0, 0.0, 6 / 12, 3 / 12, 1.0, 1 / 12]  # alpha 0.125 asks for 1.5 of 12 rows, and gets 1
        assert [row / rows[4] for row in rows[:6]] == pytest.approx(whole_rows)
        assert [plan[0].plan is None for plan in run.plans[:3]] == [True, True, False]
        assert run.plans[6] in run.plans[2:6] and run.plans[6] == run.plans[7] == run.plans[8]
        assert run.session._attached.executor.on_timed is None


def test_program_change_during_warm_up_restarts_the_count() -> None:
    with led(warmup_steps=2) as run:
        run.step(6, times=2)
        run.step(9, times=3)
        assert run.stages == [WARM_UP] * 5, "the first step of a program that replaces another is not counted"
        assert run.step(9) is GEN_POLICY and run.step(9) is STABLE


def many(operators: int) -> list[int]:
    """Return the operators of a step, in a cycle that is too long for the body of a loop."""
    return [number % 150 for number in range(10 * operators)]


def test_warm_up_compares_each_step_with_the_previous_one() -> None:
    with led(warmup_steps=4) as run:
        for operators in (100, 104, 108, 112, 116):
            run.step(operators=many(operators))
        assert run.session.stage is GEN_POLICY, "116 operators are similar to 112, though not to 100"


def test_stable_program_is_compared_with_its_planned_step_so_drift_adds_up() -> None:
    with led() as run:
        run.reach_stable(operators=many(100))
        for operators in (102, 104, 105):
            assert run.step(operators=many(operators)) is STABLE
        run.step(operators=many(107))
        assert run.step(operators=many(107)) is not STABLE, "107 operators are similar to 105, but not to 100"


# -- change and return -------------------------------------------------------------------------------------------------


def test_new_sequence_length_is_planned_and_the_first_plan_returns_at_once() -> None:
    with led(warmup_steps=1) as run:
        run.reach_stable(6)
        first = settings(run.session)
        run.stages.clear()
        run.step(9, times=5)
        assert run.stages == [STABLE, WARM_UP, GEN_POLICY, STABLE, STABLE]
        assert not is_safest(run.session) and run.session.report().replans == 2
        second = settings(run.session)
        run.step(6, times=3)
        assert run.stages[5:] == [STABLE] * 3 and settings(run.session) == first
        assert run.session.report().program == 0
        run.step(9, times=2)
        assert settings(run.session) == second and run.session.report().program == 1
        report = run.session.report()
        assert (report.replans, report.programs) == (2, 2), "nothing was planned again"
        assert report.tokenwise.recomputed_in_full == 0


def test_same_lengths_with_other_operators_are_another_program() -> None:
    with led() as run:
        run.reach_stable(operators=ONE)
        run.step(operators=OTHER, times=2)
        assert run.session.stage is not STABLE
        run.reach_stable(operators=OTHER)
        assert run.session.report().replans == 2


def test_input_sizes_tell_programs_apart_if_no_operators_are_watched() -> None:
    with led(enabled=False) as run:
        assert not any(run.recorder.watches)
        run.reach_stable(6)
        run.step(6, operators=OTHER, times=3)
        assert run.session.stage is STABLE
        run.step(9, times=2)
        assert run.session.stage is not STABLE


def test_regions_run_at_the_safest_setting_between_a_change_and_its_plan() -> None:
    with led(warmup_steps=3) as run:
        run.reach_stable(6)
        for region in run.session._attached.regions:
            region.native.leave_out(0, "aten::mm")  # as if learnt from the first program
        run.step(9, times=2)
        assert run.session.stage is WARM_UP and is_safest(run.session)
        assert all(region.native.unneeded == {} for region in run.session._attached.regions)
        assert run.session.solution is None and run.session.report().tokenwise.predicted_host_bytes is None
        run.step(9, exact=True)


def test_program_change_while_plans_are_tried_ends_the_search(plans_by_alpha: None) -> None:
    with led(policy_steps=4) as run:
        run.step(6, times=2)
        assert run.session.stage is GEN_POLICY and not is_safest(run.session)
        assert run.step(9) is WARM_UP
        assert is_safest(run.session) and run.session._attached.executor.on_timed is None
        run.reach_stable(9)
        assert run.step(6, times=2) is GEN_POLICY, "the first program was never planned for"
        run.reach_stable(6)
        assert run.session.report().replans == 2


@pytest.mark.parametrize("steps_of_the_other", [2, 3])
def test_known_program_ends_warm_up_and_search_at_once(steps_of_the_other: int, plans_by_alpha: None) -> None:
    with led(policy_steps=2) as run:
        run.reach_stable(6)
        plan = settings(run.session)
        run.step(9, times=steps_of_the_other)
        assert run.session.stage is GEN_POLICY
        assert run.step(6) is STABLE and settings(run.session) == plan
        assert run.session._attached.executor.on_timed is None and run.session.report().replans == 1


# -- a program that comes and goes -------------------------------------------------------------------------------------


def test_program_that_lasts_one_step_changes_nothing() -> None:
    # as if a validation ran every few steps
    with led(warmup_steps=2) as run:
        run.reach_stable(operators=ONE)
        plan = settings(run.session)
        del run.plans[:]
        for _ in range(4):
            run.step(operators=ONE + OTHER)
            run.step(operators=ONE, times=3)
        assert run.plans == [plan] * 16
        report = run.session.report()
        assert (report.stage, report.program, report.programs, report.replans) == ("stable", 0, 2, 1)


def test_recurring_program_that_finally_stays_gets_its_own_plan() -> None:
    with led(warmup_steps=2) as run:
        run.reach_stable(6)
        plan = settings(run.session)
        run.step(9)
        run.step(6, times=3)
        run.step(9, times=3)
        assert run.session.stage is STABLE and settings(run.session) == plan
        run.reach_stable(9)
        run.step(9, times=2)
        assert run.session.stage is WARM_UP and is_safest(run.session)
        run.reach_stable(9)
        assert run.session.report().replans == 2
        run.step(6, times=2)
        assert settings(run.session) == plan


def test_recurring_program_borrows_a_plan_until_it_stays_long_enough() -> None:
    with led(warmup_steps=1, policy_steps=3) as run:
        run.reach_stable(6)
        plan = settings(run.session)
        run.step(9)
        run.step(6)
        run.step(9, times=6)
        assert run.session.stage is STABLE and settings(run.session) == plan
        run.step(9, times=1)
        assert run.session.stage is WARM_UP


def test_rank_follows_a_change_that_only_another_rank_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    with led(warmup_steps=1) as run:
        run.reach_stable()
        monkeypatch.setattr(run.session._attached.boundary.adjuster._ranks, "vote", lambda mask: lambda: mask & ~0b1)
        run.step(times=4)
        assert run.stages[-4:] == [STABLE, WARM_UP, GEN_POLICY, STABLE]
        assert "another rank" in run.session.history[2][3] and run.session.report().program == 1


# -- the recorder ------------------------------------------------------------------------------------------------------


def test_operators_between_steps_are_no_part_of_a_program() -> None:
    # such as operators of planning, of gathers, and of a monitor
    with led() as run:

        def monitor(session: memplug.Session) -> None:
            run.recorder.ran += [1000 + session.steps] * 500

        run.session.on_step.append(monitor)
        run.step(operators=ONE, times=6)
        assert run.session.report().programs == 1 and run.session.stage is STABLE


def test_recorder_stops_with_its_session() -> None:
    with led() as run:
        run.step()
        assert not run.recorder.stopped
    assert run.recorder.stopped


def test_session_with_numeric_alpha_watches_no_operators() -> None:
    model, recorder = Stack(2), Played()
    with played(recorder), memplug.attach(model, block(alpha=0.5, regions=LAYERS)) as session:
        session.step()
        assert not any(recorder.watches)
        report = session.report()
        assert (report.program, report.programs, report.replans) == (None, 0, 0)


# -- messages ----------------------------------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    lines = [r.getMessage() for r in caplog.records if r.name == "memplug" and r.levelno == level]
    caplog.clear()
    return lines


def test_each_stage_is_logged_once_and_steps_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "memplug")
    with led() as run:
        run.reach_stable(operators=ONE)
        assert [line.split(":")[1].strip() for line in logged(caplog)] == ["warm-up", "gen-policy", "stable"]
        run.step(operators=ONE, times=5)
        assert not caplog.records
        run.step(operators=OTHER, times=2)
        changed, observed = logged(caplog)
        assert "step 9" in changed and "program 1 (600 operators)" in changed and "similarity 0.00" in changed
        run.reach_stable(operators=OTHER)
        logged(caplog)
        returns = []
        for _ in range(3):
            run.step(operators=ONE, times=2)
            run.step(operators=OTHER, times=2)
            returns.append((len(lines := logged(caplog)), lines))
        assert [count for count, _ in returns] == [2, 0, 0], "only the first return of each program is logged"
        assert "program 0 (600 operators) again" in returns[0][1][0]


def test_history_has_step_stage_program_and_reason() -> None:
    with led() as run:
        run.reach_stable(6)
        run.step(9, times=2)
        assert [(step, stage, program) for step, stage, program, _ in run.session.history] == [
            (1, GEN_POLICY, 0),
            (2, STABLE, 0),
            (4, WARM_UP, 1),
            (4, GEN_POLICY, 1),
        ]
        assert "3 region inputs (+50% of bytes)" in run.session.history[2][3]


def test_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adjuster_module, "LONGEST_HISTORY", 5)
    with led() as run:
        for step in range(12):
            run.step(6 + step)
        assert [step for step, *_ in run.session.history] == [8, 9, 10, 11, 12]


@pytest.mark.parametrize("programs", [2, 40])
def test_steps_that_always_change_get_one_plan_that_keeps_nothing(
    programs: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memplug.tokenwise.budgets.DeviceBudget.room_bytes", lambda *args: 1 << 30)
    caplog.set_level(logging.INFO, "memplug")
    with led(layers=1, warmup_steps=1) as run:
        for step in range(45):
            run.step(operators=[step % programs] * 50)
        assert run.session.stage is STABLE and run.session.report().replans == 1
        assert run.session.solution.device_bytes == 0, "a later step may be larger than the observed one"
        (warning,) = logged(caplog, logging.WARNING)
        assert "step 21" in warning and "length_tolerance" in warning


def test_endless_new_programs_between_known_ones_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memplug")
    with led(layers=1, warmup_steps=1) as run:
        run.reach_stable(operators=[1000] * 50)
        for step in range(60):
            run.step(operators=[step] * 50, times=2)
            run.step(operators=[1000] * 50)
        assert run.session.stage is STABLE
        levels = [record.levelno for record in caplog.records if record.name == "memplug"]
        assert levels.count(logging.WARNING) == 0
        assert len(run.session.history) > 110 and levels.count(logging.INFO) < 40


def test_different_watched_step_before_an_unwatched_one_changes_no_plan() -> None:
    # as if an optimizer step is skipped: nodes and bytes stay the same, so an unwatched step fits either program
    with led(policy_steps=2) as run:
        run.reach_stable(operators=ONE)
        decisions = settings(run.session)
        for _ in range(2):
            run.step(times=3)
            run.step(operators=OTHER)
            run.step(times=3)
            run.step(operators=ONE)
            assert run.plans[-8:] == [decisions] * 8 and run.session.stage is STABLE
        assert run.session.report().programs == 2 and run.session.report().replans == 1


# -- a plan that makes another program ---------------------------------------------------------------------------------


def turns(run: Led, steps: int, where: Stage) -> None:
    """Run steps whose operators change while a plan runs in the stage `where`."""
    for _ in range(steps):
        planned = not is_safest(run.session) and run.session.stage is where
        run.step(operators=OTHER if planned else ONE)


@pytest.mark.parametrize(("tries", "where"), [(4, GEN_POLICY), (0, STABLE)])
def test_safest_setting_stays_after_two_plans_that_change_the_program(
    tries: int, where: Stage, plans_by_alpha: None, caplog: pytest.LogCaptureFixture
) -> None:
    with led(policy_steps=tries, warmup_steps=1) as run:
        turns(run, 40, where)
        changes = len(run.session.history)
        assert run.session.stage is STABLE and is_safest(run.session)
        (warning,) = logged(caplog, logging.WARNING)
        assert "each plan for program" in warning and "length_tolerance" in warning
        turns(run, 20, where)
        assert len(run.session.history) == changes and is_safest(run.session)
        run.step(9, OTHER, times=3)
        run.reach_stable(9, OTHER)
        run.step(9, OTHER)
        assert not is_safest(run.session), "a program that is really another one is planned for"
        run.step(operators=ONE, times=2)
        assert run.session.stage is STABLE and is_safest(run.session)


def test_other_inputs_in_a_plans_first_step_do_not_discredit_the_plan(plans_by_alpha: None) -> None:
    with led(policy_steps=4, warmup_steps=1) as run:
        for _ in range(3):
            while run.session.stage is not GEN_POLICY or is_safest(run.session):
                run.step(operators=ONE)
            run.step(9, operators=OTHER)
        run.reach_stable(operators=ONE)
        run.step(operators=ONE)
        assert not is_safest(run.session)
