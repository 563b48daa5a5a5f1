"""Decisions in a plan's file: loaded as they were saved, and refused by the judge where no region can run by them."""

from dataclasses import replace

import pytest

from memplug.arena.plan.part import AddressPlan
from memplug.plans.judge import mistakes_of
from memplug.plans.plan_file import load, save
from memplug.plans.schema import PlannedProgram, Training
from memplug.swap.plan.part import SwapPart
from memplug.tokenwise.plan.decisions import Decision, Decisions, Learnt, Setting
from memplug.tokenwise.plan.model import Group, RegionPlan, TokenwisePlan
from tests.plans.test_plan_file import assert_same, small_plan


def decisions():
    """Of two regions."""
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
    captured = {3: Decision("aten::mm", 0.5), 4: Decision("aten::add.Tensor", 1.0, keep=True)}
    learnt = Learnt(communicates=True, offloads_late=False, unneeded={5: "aten::mm"}, asks=True)
    settings = {
        "layers.0": Setting("key", 0.25, captured, planned_from=2**64 - 5, learnt=learnt),
        "layers.1": Setting("key", plain_bytes=7),
    }
    return Decisions(
        solution=solution,
        settings=settings,
        frame_bytes=1,
        peak_bytes=7,
        full_recomputation_s=4.5,
        held_bytes=6,
        d2h_bytes_per_s=5e10,
    )


def decided_plan():
    """With decisions, as a training keeps it."""
    program = PlannedProgram(
        names=("aten::mm", "aten::t"), operators=(1, 0, 0), sizes=((1, 2), ()), nodes=3, unseen=(1,)
    )
    training = Training(run="20261123T1-a", index=1, program=program, gradients_stay=True)
    return replace(small_plan().alone(), training=training).with_part(decisions())


@pytest.mark.parametrize("without", [{}, {"parts": small_plan().alone().parts}, {"training": None}])
def test_decisions_are_loaded_as_they_were_saved(tmp_path, without):
    plan = replace(decided_plan(), **without)
    path = tmp_path / "plan.json"
    save(plan, path)
    assert load(path).training == plan.training
    assert Decisions.of(load(path)) == (None if "parts" in without else decisions())
    assert_same(load(path), small_plan())
    save(load(path), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


KINDS = (Decisions, SwapPart, AddressPlan)


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
        (replace(decided_plan(), parts={}), "a program without decisions"),
        (other_program(None), "decisions without a program"),
        (other_program(replace(decided_plan().training.program, operators=(2,))), "operators without a name"),
    ],
)
def test_decisions_that_no_region_can_run_by_are_refused_by_the_judge(plan, mistake):
    assert not list(mistakes_of(decided_plan(), KINDS))
    (found,) = mistakes_of(plan, KINDS)
    assert mistake in found
