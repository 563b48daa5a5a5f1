"""A session that adapts: warm-up, gen-policy, stable, and back when the program changes (Chameleon, Algorithm 1).

Every step of every test trains a twin without memplug beside it: losses and gradients agree through all stages.
"""

from __future__ import annotations

import itertools
import logging

import pytest

import memplug
from memplug.session import history as history_module
from memplug.session.order import HORIZON_STEPS
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


def test_warm_up_counts_each_programs_own_steps() -> None:
    with led(warmup_steps=2) as run:
        run.step(operators=ONE, times=2)
        run.step(operators=OTHER, times=2)
        assert run.stages == [WARM_UP] * 4
        assert run.step(operators=OTHER) is GEN_POLICY and run.step(operators=OTHER) is STABLE
        run.step(operators=ONE)
        assert run.step(operators=ONE) is GEN_POLICY, "two of its steps came before"
        assert run.step(operators=ONE) is STABLE


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
        assert run.stages == [STABLE, GEN_POLICY, STABLE, STABLE, STABLE]
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
        run.reach_stable(6, ONE)
        for region in run.session._attached.regions:
            region.native.leave_out(0, "aten::mm")  # as if learnt from the first program
        run.step(9, OTHER, times=3)
        assert run.session.stage is WARM_UP and is_safest(run.session)
        assert all(region.native.unneeded == {} for region in run.session._attached.regions)
        assert run.session.solution is None and run.session.report().tokenwise.predicted_host_bytes is None
        run.step(9, OTHER, exact=True)


def test_search_goes_on_when_its_program_is_back(plans_by_alpha: None) -> None:
    with led(policy_steps=4) as run:
        run.step(6, times=3)
        second = settings(run.session)
        assert run.session.stage is GEN_POLICY and not is_safest(run.session)
        run.step(9, times=2)
        assert run.session.report().replans == 0
        run.reach_stable(9)
        assert run.session._attached.executor.on_timed is None
        seen = []
        run.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(settings(run.session)))
        run.step(6, times=5)
        assert seen[0] == second and seen[1] != second, "its second plan had not been tried"
        assert run.session.stage is STABLE and run.session.report().replans == 2
        assert "of 4 tried" in run.session.history[-1][3]


@pytest.mark.parametrize("steps_of_the_other", [2, 3])
def test_known_program_runs_under_its_plan_amid_anothers_search(steps_of_the_other: int, plans_by_alpha: None) -> None:
    with led(policy_steps=2) as run:
        run.reach_stable(6)
        plan, seen = settings(run.session), []
        run.step(9, times=steps_of_the_other)
        assert run.session.stage is GEN_POLICY
        handle = run.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(settings(run.session)))
        run.step(6)
        handle.remove()
        assert seen == [plan] and run.session._attached.executor.on_timed is None
        assert run.session.report().replans == 1


# -- a program that comes and goes -------------------------------------------------------------------------------------


def test_program_that_comes_every_fourth_step_gets_a_plan_and_changes_no_other() -> None:
    # as if a validation ran every few steps; the inputs are the same
    with led(warmup_steps=2) as run:
        run.reach_stable(operators=ONE)
        plan = settings(run.session)
        del run.plans[:]
        for _ in range(8):
            run.step(operators=ONE + OTHER)
            run.step(operators=ONE, times=3)
        assert [each for number, each in enumerate(run.plans) if number % 4] == [plan] * 24
        report = run.session.report()
        assert (report.programs, report.replans) == (2, 2)
        assert run.plans[-4][0] is not plan[0], "its steps are expected, and run under its own plan"


def test_known_program_keeps_its_plan_while_another_stays() -> None:
    with led(warmup_steps=2) as run:
        run.reach_stable(6)
        plan = settings(run.session)
        run.step(9)
        run.step(6, times=3)
        assert run.session.stage is STABLE and settings(run.session) == plan
        run.reach_stable(9)
        run.step(9, times=3)
        assert run.session.report().replans == 2 and settings(run.session) != plan
        run.step(6, times=2)
        assert settings(run.session) == plan


def test_larger_inputs_of_an_unknown_program_run_at_the_safest_setting() -> None:
    with led(warmup_steps=2) as run:
        run.reach_stable(6)
        plan, seen = settings(run.session), []
        run.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(settings(run.session) == plan))
        for length in (6, 5, 9, 6):
            run.step(length)
        assert seen == [True, True, False, True], "a smaller step fits under the plan in force"


@pytest.mark.parametrize("pattern", ["AB", "AAB", "AAAB", "ABC"])
def test_programs_that_take_turns_each_run_under_their_own_plan(pattern: str, plans_by_alpha: None) -> None:
    lengths = {"A": 6, "B": 9, "C": 4}
    with led(policy_steps=3, warmup_steps=1) as run:
        seen = []
        run.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(settings(run.session)))
        for kind in pattern * (32 // len(pattern) + 6):
            run.step(lengths[kind])
        assert run.session.report().replans == len(set(pattern))
        latest = dict(zip(pattern * (len(seen) // len(pattern)), seen, strict=True))
        for kind in latest:
            of_kind = [each for own, each in zip(itertools.cycle(pattern), seen, strict=False) if own == kind]
            assert of_kind[0] != of_kind[-1]
            # two steps of warm-up, one observed, three tried: from then on each step runs under the best
            assert of_kind[6:] == [latest[kind]] * len(of_kind[6:])
        assert len({str(each) for each in latest.values()}) == len(set(pattern))


def test_rank_follows_a_change_that_only_another_rank_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    with led(warmup_steps=1) as run:
        run.reach_stable()
        ranks = run.session._attached.boundary.adjuster._ranks
        monkeypatch.setattr(ranks, "vote", lambda mask: lambda: mask & ~0b1)
        monkeypatch.setattr(ranks, "gather", lambda value, **_: [value, 0] if type(value) is int else [value])
        run.step(times=4)
        assert run.stages[-4:] == [STABLE, GEN_POLICY, STABLE, STABLE]
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
    monkeypatch.setattr(history_module, "LONGEST_HISTORY", 5)
    with led() as run:
        for step in range(12):
            run.step(operators=[step] * 50)
        assert [step for step, *_ in run.session.history] == [10, 11, 11, 12, 12], "each is met, and then observed"


@pytest.mark.parametrize("programs", [40, 1000])
def test_programs_that_never_repeat_get_one_plan_that_keeps_nothing(
    programs: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memplug.tokenwise.budgets.DeviceBudget.room_bytes", lambda *args: 1 << 30)
    caplog.set_level(logging.INFO, "memplug")
    with led(layers=1, warmup_steps=1) as run:
        for step in range(HORIZON_STEPS + 4):
            run.step(operators=[step % programs] * 50)
        assert run.session.stage is STABLE and run.session.report().replans == 1
        assert run.session.solution.device_bytes == 0, "a later step may be larger than the observed one"
        (warning,) = logged(caplog, logging.WARNING)
        assert f"step {HORIZON_STEPS}" in warning and "length_tolerance" in warning


def test_programs_that_repeat_too_rarely_for_a_plan_get_one_plan_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with led(layers=1, warmup_steps=5) as run:
        for step in range(6 * HORIZON_STEPS + 8):
            run.step(operators=[step // 2 % 100] * 50)  # each twice, and then 100 steps later
        assert run.session.stage is STABLE and run.session.report().replans == 1
        (warning,) = logged(caplog, logging.WARNING)
        assert f"step {6 * HORIZON_STEPS}" in warning


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
