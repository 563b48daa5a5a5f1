"""The judge accepts valid plans and no others, whichever field is corrupted."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memplug.arena.judge import Fault, judge_addresses
from memplug.arena.plan.part import AddressPlan, DynamicSpace, PromisedBytes, address_plan
from memplug.arena.plan.problem import BUFFER, ORDERING, Problem, Solution
from memplug.errors import LayoutError
from memplug.profile.records import Fingerprint
from tests.support.layouts import LAYERS, PHASES, address_plans, at, is_valid_plan, problem_of

TWO = problem_of((0, 2, 4), (1, 3, 8))


def codes(findings):
    return [finding.code for finding in findings]


@given(address_plans(streams=2))
def test_judge_accepts_valid_plans(plan):
    assert is_valid_plan(plan)
    assert judge_addresses(plan) == ()


def one_more(draw, value):
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + draw(st.sampled_from((-100, -2, -1, 1, 2, 100, 2**40)))
    if isinstance(value, float):
        return draw(st.sampled_from((value + 0.01, value - 0.01, -1.0, 1.0, float("nan"))))
    if isinstance(value, str):
        return value + "x"
    assert isinstance(value, tuple)
    if not value or draw(st.booleans()):
        return (*value, *value) if value else ("x",)
    return value[1:]


def in_array(draw, array, column):
    """Return the array with one value changed; columns of 32 bits stay in their range."""
    assume(len(array))
    row, changed = draw(st.integers(0, len(array) - 1)), array.copy()
    values = changed[column] if column else changed
    old = values[row].item()
    new = one_more(draw, old)
    limit = np.iinfo(values.dtype).max if values.dtype.kind == "i" else 0
    if limit and not -limit <= new <= limit:
        new = old + 1
    if values.dtype.kind == "U":
        changed = changed.astype("U9")
        values = changed
    values[row] = new
    return changed


def in_problem(name, column=None):
    def corrupt(draw, plan):
        problem = plan.problem
        values = {each.name: getattr(problem, each.name) for each in fields(Problem)}
        if name == "fingerprint":
            old = getattr(problem.fingerprint, column)
            values[name] = replace(problem.fingerprint, **{column: one_more(draw, old)})
        elif isinstance(values[name], tuple):
            assume(values[name])
            values[name] = one_more(draw, values[name])
        else:
            values[name] = in_array(draw, values[name], column)
        return replace(plan, problem=Problem(**values))

    return corrupt


def in_solution(name):
    def corrupt(draw, plan):
        old = getattr(plan.solution, name)
        new = in_array(draw, old, None) if name == "offsets" else one_more(draw, old)
        return replace(plan, solution=replace(plan.solution, **{name: new}))

    return corrupt


def in_predictions(name):
    def corrupt(draw, plan):
        new = one_more(draw, getattr(plan.predictions, name))
        return replace(plan, predictions=replace(plan.predictions, **{name: new}))

    return corrupt


def in_dynamic(name):
    def corrupt(draw, plan):
        groups = list(plan.dynamic)
        number = draw(st.integers(0, len(groups) - 1))
        old = getattr(groups[number], name)
        if name == "spaces" and old and draw(st.booleans()):
            bounds = [list(space) for space in old]
            space, side = draw(st.integers(0, len(bounds) - 1)), draw(st.integers(0, 1))
            bounds[space][side] = one_more(draw, bounds[space][side])
            new = tuple(map(tuple, bounds))
        elif name == "spaces":
            new = (*old, old[0]) if old else ((0, 1),)
        elif name == "mallocs":
            at = draw(st.integers(0, len(old) - 1))
            new = (*old[:at], one_more(draw, old[at]), *old[at + 1 :])
        else:
            new = one_more(draw, old)
        groups[number] = replace(groups[number], **{name: new})
        return replace(plan, dynamic=tuple(groups))

    return corrupt


OF_THE_PROBLEM = {
    **{f"buffers.{name}": in_problem("buffers", name) for name in BUFFER.names},
    **{f"orderings.{name}": in_problem("orderings", name) for name in ORDERING.names},
    **{f"fingerprint.{each.name}": in_problem("fingerprint", each.name) for each in fields(Fingerprint)},
    **{name: in_problem(name) for name in ("ids", "phases", "layers", "terms")},
}
OF_THE_REST = {
    **{f"solution.{each.name}": in_solution(each.name) for each in fields(Solution)},
    **{f"predictions.{each.name}": in_predictions(each.name) for each in fields(PromisedBytes)},
    **{f"dynamic.{each.name}": in_dynamic(each.name) for each in fields(DynamicSpace)},
}


def test_every_field_of_a_plan_is_corrupted_in_some_test():
    corrupted = {name.split(".")[0] for name in (OF_THE_PROBLEM | OF_THE_REST)}
    of_problem = {each.name for each in fields(Problem)}
    assert corrupted == of_problem | {each.name for each in fields(AddressPlan)} - {"problem"}
    # other parts are corrupted elsewhere: decisions in tests/plans/test_plan_decisions.py, lists in tests/swap


@pytest.mark.parametrize("field", OF_THE_PROBLEM | OF_THE_REST)
@given(plan=address_plans(most=5, streams=2, fewest=1, fewest_groups=1), data=st.data())
@settings(max_examples=25)
def test_judge_refuses_a_corrupted_field_unless_the_plan_stays_valid(field, plan, data):
    try:
        corrupted = (OF_THE_PROBLEM | OF_THE_REST)[field](data.draw, plan)
    except LayoutError:
        return  # `Problem` itself refuses the value
    assert (judge_addresses(corrupted) == ()) == is_valid_plan(corrupted)


def plan_of(problem, *offsets, spaces=(), **group):
    """Return a plan of these offsets, with one dynamic group of these spaces and fields."""
    values = {"malloc_phase": -1, "malloc_layer": -1, "free_phase": -1, "free_layer": -1, "stream": 0, "lower": 0}
    values |= {"upper": 9, "spaces": tuple(spaces), "peak_bytes": 5, **group}
    values = {"mallocs": (values["lower"],), **values}
    return address_plan(problem, at(problem, *offsets), (DynamicSpace(**values),), values["peak_bytes"])


FOUR = problem_of((0, 4, 4), (2, 6, 4), (6, 9, 4), (1, 4, 4), phases=PHASES, layers=LAYERS)
DYNAMIC = {
    "above what is used": ({"lower": 6, "upper": 9, "spaces": [(0, 4), (8, 12)]}, None),
    "until the malloc": ({"lower": 4, "upper": 6, "spaces": [(0, 4), (8, 12)]}, None),
    "touching": ({"lower": 4, "upper": 6, "spaces": [(0, 2), (2, 4)]}, None),
    "none": ({"spaces": []}, None),
    "a byte of the highest": ({"lower": 6, "upper": 9, "spaces": [(3, 5)]}, Fault.SPACE_IN_USE),
    "the whole of one": ({"lower": 0, "upper": 9, "spaces": [(0, 12)]}, Fault.SPACE_IN_USE),
    "inside of one": ({"lower": 6, "upper": 9, "spaces": [(5, 6)]}, Fault.SPACE_IN_USE),
    "an instant too long": ({"lower": 4, "upper": 7, "spaces": [(0, 8)]}, Fault.SPACE_IN_USE),
    "beyond the arena": ({"lower": 6, "upper": 9, "spaces": [(8, 13)]}, Fault.SPACE_BEYOND_ARENA),
    "empty": ({"lower": 6, "upper": 9, "spaces": [(8, 8)]}, Fault.SPACES),
    "falling": ({"lower": 6, "upper": 9, "spaces": [(8, 12), (0, 4)]}, Fault.SPACES),
    "one in the other": ({"lower": 6, "upper": 9, "spaces": [(0, 4), (2, 4)]}, Fault.SPACES),
    "below 0": ({"lower": 6, "upper": 9, "spaces": [(-1, 4)]}, Fault.SPACES),
    "at no time": ({"lower": 6, "upper": 6, "spaces": [(0, 4)]}, Fault.WINDOW),
    "before the beginning": ({"lower": -1, "upper": 2, "spaces": []}, Fault.WINDOW),
    "no requests": ({"mallocs": ()}, Fault.GROUP),
    "a request before its time": ({"lower": 1, "mallocs": (0, 1)}, Fault.GROUP),
    "a request after its time": ({"mallocs": (0, 9)}, Fault.GROUP),
    "requests that do not rise": ({"mallocs": (0, 2, 2)}, Fault.GROUP),
    "a stream below 0": ({"stream": -1}, Fault.GROUP),
    "fewer than no bytes": ({"peak_bytes": -1}, Fault.GROUP),
    "no such phase": ({"malloc_phase": 3}, Fault.PLACE),
    "no such layer": ({"free_layer": -2}, Fault.PLACE),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_judge_names_the_fault_of_each_invalid_dynamic_group(name):
    group, code = DYNAMIC[name]
    found = judge_addresses(plan_of(FOUR, 0, 4, 4, 8, **group))
    assert codes(found) == ([] if code is None else [code])


def test_wrong_prediction_is_reported_with_both_numbers():
    plan = address_plan(TWO, at(TWO, 0, 4))
    wrong = replace(plan, predictions=replace(plan.predictions, static_peak_bytes=11))
    (found,) = judge_addresses(wrong)
    assert (found.code, found.message) == (
        Fault.PREDICTION,
        "static_peak_bytes is predicted to be 11, where the plan gives 12",
    )
