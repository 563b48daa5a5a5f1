"""Decisions in a plan file are loaded as they were saved, and refused by the judge if no region can use them."""

from dataclasses import replace

import pytest

from memplug.plans.judge import mistakes_of
from memplug.plans.plan_file import load, save
from memplug.session.techniques import JUDGES
from memplug.tokenwise.plan.decisions import Decision, Decisions
from tests.support.memory_plans import assert_same, decided_plan, decisions, small_plan


@pytest.mark.parametrize("without", [{}, {"parts": small_plan().alone().parts}, {"training": None}])
def test_loaded_decisions_equal_saved_ones(tmp_path, without):
    plan = replace(decided_plan(), **without)
    path = tmp_path / "plan.json"
    save(plan, path)
    assert load(path).training == plan.training
    assert Decisions.of(load(path)) == (None if "parts" in without else decisions())
    assert_same(load(path), small_plan())
    save(load(path), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def wrong_region(**fields):
    settings = decisions().settings
    wrong = {**settings, "layers.0": replace(settings["layers.0"], **fields)}
    return decided_plan().with_part(replace(decisions(), settings=wrong))


def wrong_solution(**fields):
    return decided_plan().with_part(replace(decisions(), solution=replace(decisions().solution, **fields)))


def other_program(program):
    plan = decided_plan()
    return replace(plan, training=replace(plan.training, program=program))


@pytest.mark.parametrize(
    ("plan", "mistake"),
    [
        (wrong_region(key="other"), "for which the plan has no region"),
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
        (other_program(replace(decided_plan().training.program, operators=(2,))), "operators without a name"),
    ],
)
def test_judge_refuses_decisions_that_no_region_can_use(plan, mistake):
    assert not list(mistakes_of(decided_plan(), JUDGES))
    (found,) = mistakes_of(plan, JUDGES)
    assert mistake in found
