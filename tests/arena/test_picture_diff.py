"""A diff of two plans counts moved, resized, added and removed requests, and nothing else."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.arena.plan.part import AddressPlan, DynamicSpace, address_plan
from memplug.arena.plan.problem import BUFFER, Buffer, Problem, buffers, solved
from memplug.profile.records import Fingerprint, Layer
from memplug.show import plan_diff
from memplug.show.plan_diff import rows
from tests.support.layouts import LAYERS, PHASES, address_plans, stacked

REQUESTS = ("same", "moved", "resized", "only_in_a", "only_in_b")


def plan_of(*rows_of_it, offsets=None, **fields):
    """Return a plan of requests (phase, layer, size), each in use until the end of the step."""
    count = len(rows_of_it)
    made = [
        Buffer(lower=i, upper=count + 1, size=size, lower_phase=phase, lower_layer=layer)
        for i, (phase, layer, size) in enumerate(rows_of_it)
    ]
    problem = Problem(buffers=buffers(made), **{"phases": PHASES, "layers": LAYERS, **fields})
    solution = stacked(problem) if offsets is None else solved(problem, np.array(offsets, np.int64), "test")
    return address_plan(problem, solution)


def diff(a: AddressPlan, b: AddressPlan):
    """Compare two plans that consist of these addresses alone."""
    return plan_diff.diff(a.alone(), b.alone())


def counts(facts):
    return {name: facts[f"{name}_requests"] for name in REQUESTS if facts[f"{name}_requests"]}


BASE = [(0, 0, 8), (0, 0, 16), (0, 1, 8), (0, 1, 8), (1, 1, 32), (1, 0, 8), (-1, -1, 8)]


@given(address_plans(streams=2))
def test_diff_of_a_plan_with_itself_has_only_equal_requests(plan):
    facts = diff(plan, plan)
    assert counts(facts) == ({"same": len(plan.problem)} if len(plan.problem) else {})
    assert facts["same_bytes"] == facts["a"]["requests_bytes"] == int(plan.problem.buffers["size"].sum())
    assert facts["a"] == facts["b"] and facts["same_dynamic_spaces"] and facts["fingerprint"] == {}
    assert facts["height_change_bytes"] == facts["lower_bound_change_bytes"] == facts["fragmentation_change"] == 0


@given(address_plans(streams=2), address_plans(streams=2))
def test_diff_counts_every_request_once_and_is_symmetric(a, b):
    facts, back = diff(a, b), diff(b, a)
    for side, plan in (("a", a), ("b", b)):
        counted = facts["same_requests"] + facts["resized_requests"] + facts[f"only_in_{side}_requests"]
        nbytes = facts["same_bytes"] + facts[f"resized_{side}_bytes"] + facts[f"only_in_{side}_bytes"]
        assert counted == len(plan.problem)
        assert nbytes == int(plan.problem.buffers["size"].sum())
    for name, exchanged in (("same", "same"), ("moved", "moved"), ("resized", "resized"), ("only_in_a", "only_in_b")):
        assert facts[f"{name}_requests"] == back[f"{exchanged}_requests"]
    assert facts["moved_requests"] <= facts["same_requests"]
    json.dumps(facts, allow_nan=False)
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in rows(facts))


@given(st.permutations(range(len(BASE))))
def test_diff_does_not_depend_on_row_order(order):
    plan = plan_of(*BASE)
    shuffled = replace(plan.solution, offsets=plan.solution.offsets[order])
    assert counts(diff(plan, address_plan(plan.problem.part(np.array(order)), shuffled))) == {"same": len(BASE)}


@pytest.mark.parametrize("row", range(len(BASE) + 1))
@pytest.mark.parametrize("size", [8, 24])
def test_added_request_counts_once_and_only_in_the_second_plan(row, size):
    more = [*BASE[:row], (0, 1, size), *BASE[row:]]
    facts = diff(plan_of(*BASE), plan_of(*more))
    assert facts["same_requests"] == len(BASE) and facts["only_in_b_requests"] == 1
    assert facts["only_in_b_bytes"] == size
    assert facts["resized_requests"] == facts["only_in_a_requests"] == 0
    (most,) = facts["only_in_b_largest"]
    assert (most["phase"], most["layer"], most["b_bytes"]) == ("forward of micro-batch 0", "layers.1", size)


def test_removed_request_counts_only_in_the_first_plan():
    facts = diff(plan_of(*BASE), plan_of(*BASE[:4], *BASE[5:]))
    assert counts(facts) == {"same": 6, "moved": 2, "only_in_a": 1}
    assert facts["only_in_a_bytes"] == 32


@pytest.mark.parametrize("row", range(len(BASE)))
def test_request_with_a_changed_size_counts_as_resized(row):
    phase, layer, size = BASE[row]
    facts = diff(plan_of(*BASE), plan_of(*BASE[:row], (phase, layer, 1000), *BASE[row + 1 :]))
    assert (facts["resized_requests"], facts["resized_a_bytes"], facts["resized_b_bytes"]) == (1, size, 1000)
    assert facts["same_requests"] == len(BASE) - 1
    assert facts["only_in_a_requests"] == facts["only_in_b_requests"] == 0
    (largest,) = facts["resized_largest"]
    assert (largest["a_bytes"], largest["b_bytes"]) == (size, 1000)


def test_request_with_a_changed_offset_counts_as_moved():
    rows_of_it = [(0, 0, 8), (0, 0, 16), (0, 0, 4)]
    facts = diff(plan_of(*rows_of_it, offsets=[0, 8, 24]), plan_of(*rows_of_it, offsets=[16, 0, 24]))
    assert counts(facts) == {"same": 3, "moved": 2}
    assert facts["moved_bytes"] == 24
    assert [(each["a_offset_bytes"], each["b_offset_bytes"]) for each in facts["moved_largest"]] == [(8, 0), (0, 16)]


@pytest.mark.parametrize("change", [{"lower_phase": 1}, {"lower_layer": 1}, {"stream": 1}])
def test_requests_match_only_within_one_phase_layer_and_stream(change):
    plan = plan_of((0, 0, 8), (0, 0, 8))
    table = plan.problem.buffers.copy()
    for name, value in change.items():
        table[name][1] = value
    other = Problem(buffers=table, phases=PHASES, layers=LAYERS)
    assert counts(diff(plan, address_plan(other, stacked(other)))) == {"same": 1, "only_in_a": 1, "only_in_b": 1}


def test_phases_and_layers_are_compared_by_content_not_by_index():
    a = plan_of(*BASE)
    table = a.problem.buffers.copy()
    for column, count in (("lower_phase", len(PHASES)), ("lower_layer", len(LAYERS))):
        table[column] = np.where(table[column] < 0, -1, count - 1 - table[column])
    problem = Problem(buffers=table, phases=PHASES[::-1], layers=LAYERS[::-1])
    assert counts(diff(a, address_plan(problem, stacked(problem)))) == {"same": len(BASE)}
    renamed = plan_of(*BASE, layers=tuple(Layer(f"other.{i}") for i in range(len(LAYERS))))
    assert counts(diff(a, renamed)) == {"same": 1, "only_in_a": 6, "only_in_b": 6}


def test_diff_names_the_differences_between_programs():
    base = Fingerprint(model="Llama", parameters=1000, inputs=("int64[1, 8]",), versions=(("torch", "2.11"),))
    other = replace(base, parameters=2000, inputs=("int64[1, 16]",), versions=(("torch", "2.12"),))
    facts = diff(plan_of(*BASE, fingerprint=base), plan_of(*BASE, fingerprint=other))
    assert sorted(facts["fingerprint"]) == ["inputs", "parameters", "versions"]
    assert facts["fingerprint"]["parameters"] == {"a": 1000, "b": 2000}
    words = dict(rows(facts))
    assert words["other parameters"] == "1,000 in A, 2,000 in B"
    assert words["other inputs"] == "int64[1, 8] in A, int64[1, 16] in B"
    assert words["other versions"] == "torch 2.11 in A, torch 2.12 in B"


def test_diff_describes_changed_heights_and_planners_in_words():
    a, b = plan_of((0, 0, 2**30), (0, 0, 2**29)), plan_of((0, 0, 2**30), (0, 0, 2**29), offsets=[2**29, 0])
    b = replace(b, solution=replace(b.solution, height=2**31))
    facts = diff(a, b)
    assert facts["height_change_bytes"] == 2**29
    assert facts["fragmentation_change"] == pytest.approx(0.25)
    words = dict(rows(facts))
    assert words["planner"] == "stacked in A, test, optimal in B"
    assert words["height"] == "1.50 GiB in A, 2.00 GiB in B: 512.00 MiB more, +33.33%"
    assert words["lower bound"] == "1.50 GiB (1,610,612,736 bytes) in both"
    assert words["fragmentation"] == "0.00% in A, 25.00% in B"
    assert words["  at another offset"] == "2 requests, 1.50 GiB"
    assert words["    the largest"] == ("1.00 GiB at 0 -> 536,870,912: request 0, forward of micro-batch 0, layers.0")
    assert words["only in A"] == words["only in B"] == words["resized"] == "none"


def test_diff_reports_different_reusable_space():
    group = DynamicSpace(
        malloc_phase=0,
        malloc_layer=2,
        free_phase=0,
        free_layer=2,
        stream=0,
        lower=0,
        upper=3,
        spaces=((8, 9),),
        mallocs=tuple(range(3)),
        peak_bytes=9,
    )
    plan = plan_of(*BASE)
    a = address_plan(plan.problem, plan.solution, (group,), 9)
    b = address_plan(plan.problem, plan.solution, (replace(group, spaces=((8, 10),)),), 9)
    assert not diff(a, b)["same_dynamic_spaces"]
    assert dict(rows(diff(a, b)))["dynamic requests"] == "1 group, 9 bytes in both; reusable space differs"
    assert dict(rows(diff(a, a)))["dynamic requests"] == "1 group, 9 bytes in both"


def test_plans_of_named_buffers_can_be_compared():
    table = np.zeros(2, BUFFER)
    table["upper"], table["size"], table["alignment"] = 1, (8, 16), 1
    for name in ("lower_phase", "lower_layer", "upper_phase", "upper_layer"):
        table[name] = -1
    named = Problem(buffers=table, ids=np.array(["x", "y"]))
    facts = diff(
        address_plan(named, stacked(named)), address_plan(named.part(np.array([1])), stacked(named.part(np.array([1]))))
    )
    assert counts(facts) == {"same": 1, "moved": 1, "only_in_a": 1}
    assert facts["only_in_a_largest"][0]["a_id"] == "x"
    assert "8 bytes at 0: request x" in dict(rows(facts)).values()
