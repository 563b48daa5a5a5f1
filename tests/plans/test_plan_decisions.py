"""Decisions in a plan's file: loaded as they were saved, and refused by the judge where no region can run by them."""

from dataclasses import replace

import pytest

from memplug.arena.judge import Fault
from memplug.plans.judge import judge_plan
from memplug.plans.plan_file import load, save
from memplug.tokenwise.plan.decisions import Decision
from tests.support.memory_plans import assert_same, decided_plan


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
