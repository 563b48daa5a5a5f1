"""Decisions in a plan's file: loaded as they were saved, and refused by the judge where no region can run by them."""

from dataclasses import replace

import pytest

from memplug.arena.judge import Fault
from memplug.plans.judge import judge_plan
from memplug.plans.plan_file import load, save
from memplug.plans.schema import PlannedProgram, Training
from memplug.tokenwise.plan.decisions import Decision, Decisions, Learnt, Setting
from memplug.tokenwise.plan.model import Group, RegionPlan, TokenwisePlan
from tests.plans.test_plan_file import assert_same, small_plan


def decided_plan():
    """With decisions, as a training keeps it."""
    group = Group(
        instances=2,
        fractions={3: 0.5},
        keep=frozenset({9, 4}),
        runs=frozenset({7, 2}),
        swapped_bytes=5,
        kept_bytes=6,
        recompute_s=0.1,
    )
    solution = TokenwisePlan(
        regions={"key": RegionPlan(groups=(group, replace(group, plain=True)), forward_s=1.0, backward_s=2.0)},
        alpha=None,
        alpha_cut_by_host=False,
        inputs_swapped=True,
        forward_s=1.0,
        backward_s=2.0,
        step_s=3.0,
        host_bytes=4,
        device_bytes=5,
        in_flight_bytes=0,
        bound="none",
    )
    decisions = {3: Decision("aten::mm", 0.5), 4: Decision("aten::add.Tensor", 1.0, keep=True)}
    learnt = Learnt(communicates=True, offloads_late=False, unneeded={5: "aten::mm"}, asks=True)
    settings = {
        "layers.0": Setting("key", 0.25, decisions, planned_from=2**64 - 5, learnt=learnt),
        "layers.1": Setting("key", plain_bytes=7),
    }
    decisions = Decisions(
        solution=solution, settings=settings, frame_bytes=1, peak_bytes=7, full_recomputation_s=4.5, held_bytes=6
    )
    program = PlannedProgram(
        names=("aten::mm", "aten::t"), operators=(1, 0, 0), sizes=((1, 2), ()), nodes=3, unseen=(1,)
    )
    training = Training(
        run="20261123T1-a", index=1, program=program, decisions=decisions, gradients_stay=True, d2h_bytes_per_s=5e10
    )
    return replace(small_plan(), training=training)


@pytest.mark.parametrize("without", [{}, {"decisions": None}, {"program": None}])
def test_decisions_are_loaded_as_they_were_saved(tmp_path, without):
    plan = decided_plan()
    plan = replace(plan, training=replace(plan.training, **without))
    path = tmp_path / "plan.json"
    save(plan, path)
    assert_same(load(path), plan)
    save(load(path), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def wrong_region(**fields):
    plan = decided_plan()
    settings = plan.training.decisions.settings
    wrong = {**settings, "layers.0": replace(settings["layers.0"], **fields)}
    return replace(plan, training=replace(plan.training, decisions=replace(plan.training.decisions, settings=wrong)))


def wrong_solution(**fields):
    plan = decided_plan()
    solution = replace(plan.training.decisions.solution, **fields)
    decisions = replace(plan.training.decisions, solution=solution)
    return replace(plan, training=replace(plan.training, decisions=decisions))


def wrong_training(**fields):
    plan = decided_plan()
    return replace(plan, training=replace(plan.training, **fields))


@pytest.mark.parametrize(
    ("plan", "mistake"),
    [
        (wrong_region(key="other"), "which the plan says nothing of"),
        (wrong_region(rows=1.5), "the fraction 1.5 of its rows"),
        (wrong_region(forward_bytes=-1), "-1 bytes"),
        (wrong_region(plain_bytes=-2), "-2 bytes"),
        (wrong_region(plan={0: Decision("aten::mm", 0.0)}), "operator 0: 0.0 of aten::mm"),
        (wrong_region(plan={0: Decision("aten::mm", 1.01)}), "operator 0: 1.01 of aten::mm"),
        (wrong_region(plan={0: Decision("aten::mm", 0.5, keep=True)}), "operator 0: 0.5 of aten::mm"),
        (wrong_region(plan={-1: Decision("aten::mm", 1.0)}), "operator -1"),
        (wrong_solution(host_bytes=-1), "host_bytes is -1"),
        (wrong_solution(device_bytes=-1), "device_bytes is -1"),
        (wrong_solution(step_s=-0.5), "step_s is -0.5"),
        (wrong_training(decisions=None), "a program without decisions"),
        (wrong_training(program=None), "decisions without a program"),
        (wrong_training(program=replace(decided_plan().training.program, operators=(2,))), "operators without a name"),
    ],
)
def test_decisions_that_no_region_can_run_by_are_refused_by_the_judge(plan, mistake):
    assert not [each for each in judge_plan(decided_plan()) if each.code is Fault.DECISION]
    (found,) = (each for each in judge_plan(plan) if each.code is Fault.DECISION)
    assert mistake in found.message
