"""The cost model: the linear program, `measure` and `without_idle` price every choice alike."""

from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from memplug.tokenwise.plan import solver as tokenwise
from memplug.tokenwise.plan.cost import chosen, measure
from memplug.tokenwise.plan.idle import without_idle
from memplug.tokenwise.plan.linear_program import LinearProgram
from memplug.tokenwise.plan.model import group_of
from memplug.tokenwise.plan.solver import _Search
from tests.support import plans
from tests.support.plans import MIB, budgets, problems


@st.composite
def choices(draw):
    """Draw regions, one or two groups for each, a budget that the choice fits, and whether inputs are swapped."""
    regions = [replace(one, overhead_forward_s=0.5, overhead_backward_s=0.25) for one in draw(problems)]
    padding_bytes = draw(st.sampled_from((0, 0, MIB)))
    # a swapped share of a tensor still takes all of its padding, which a linear program cannot express
    parts = (0.0, 1.0) if padding_bytes else (0.0, 0.25, 0.5, 1.0)
    groups = []
    for region in regions:
        first = draw(st.integers(1, region.instances))
        sizes = [size for size in (first, region.instances - first) if size]
        groups.append([])
        for size in sizes:
            fractions, keep = {}, []
            for index, operator in enumerate(region.operators):
                if operator.capturable:
                    share = draw(st.sampled_from((*(parts if operator.capture == "rows" else (0.0, 1.0)), "keep")))
                    if share == "keep":
                        keep.append(index)
                    else:
                        fractions[index] = share
            groups[-1].append(group_of(region, size, fractions, keep))
    kept_bytes = sum(group.instances * group.kept_bytes for of_region in groups for group in of_region)
    kept_bytes += sum(
        region.staying * of_region[-1].kept_bytes for region, of_region in zip(regions, groups, strict=True)
    )
    limits = draw(budgets)
    room = dict(host_bytes=plans.AMPLE, padding_bytes=padding_bytes, device_bytes=limits.device_bytes // 4 + kept_bytes)
    return regions, groups, replace(limits, **room), draw(st.booleans())


@mock.patch.multiple(tokenwise, TIE_HOST=1.0, TIE_DEVICE=0.5)
def objectives(regions, groups, limits, inputs_swapped):
    """Return the cost of one choice twice: by the linear program, with its columns fixed, and by `measure`.

    Bytes weigh as much as time here.
    """
    search = _Search(regions, limits, inputs_swapped)
    program, columns = search._program([tuple(group.instances for group in parts) for parts in groups])
    for own, parts in zip(columns, groups, strict=True):
        for column_of, group in zip(own, parts, strict=True):
            fixed = {column: group.fractions.get(index, 0.0) for index, column in column_of.swap.items()}
            fixed |= {column: float(index in group.keep) for index, column in column_of.keep.items()}
            for index, column in column_of.run.items():
                fixed[column] = 1.0 - group.fractions.get(index, 0.0) if index in group.runs else 0.0
            for column, value in fixed.items():
                program.lower[column] = program.upper[column] = value
    solved = program.run(relaxed=True)
    plan = measure(regions, groups, limits, inputs_swapped=inputs_swapped)
    inputs_bytes = inputs_swapped and sum(r.instances * (r.input_bytes + limits.padding_bytes) for r in regions)
    return solved.fun, search._objective_of(plan) - search._objective(0.0, inputs_bytes, 0)


def agree(case):
    by_program, by_measure = objectives(*case)
    return by_program == pytest.approx(by_measure, rel=1e-7, abs=1e-9)


@given(choices())
@settings(max_examples=150, deadline=None)
def test_linear_program_prices_every_choice_like_measure(case):
    by_program, by_measure = objectives(*case)
    assert by_program == pytest.approx(by_measure, rel=1e-7, abs=1e-9)


def notices():
    """Return whether a random search finds a choice that the linear program and `measure` price differently."""
    generated = settings(max_examples=600, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    return not agree(find(choices(), lambda case: not agree(case), settings=generated))


@pytest.mark.long
@pytest.mark.parametrize("piece", range(10))
def test_omitting_a_time_term_from_the_linear_program_changes_a_price(piece):
    class Lacking(LinearProgram):
        def largest(self, *pieces):
            before = getattr(self, "pieces", 0)
            self.pieces = before + len(pieces)
            return super().largest(*(one for at, one in enumerate(pieces, before) if at != piece))

    with mock.patch.object(tokenwise, "LinearProgram", Lacking):
        assert notices()


@pytest.mark.parametrize("amount", ["recompute_s", "swapped_bytes", "swapped_tensors", "kept_bytes"])
def test_omitting_an_amount_from_the_linear_program_changes_a_price(amount):
    with mock.patch.object(tokenwise, "chosen", lambda limits, **terms: chosen(limits, **terms | {amount: 0})):
        assert notices()


@given(choices())
@settings(max_examples=150, deadline=None)
def test_without_idle_drops_all_captures_whose_removal_costs_no_time(case):
    regions, groups, limits, inputs_swapped = case
    plan = measure(regions, groups, limits, inputs_swapped=inputs_swapped)
    tried, step_s = [list(parts) for parts in groups], plan.step_s
    for region, parts in zip(regions, tried, strict=True):
        for at, group in enumerate(parts):
            for index in (*group.fractions, *sorted(group.keep)):
                before = parts[at]
                fractions = {i: share for i, share in before.fractions.items() if i != index}
                parts[at] = group_of(region, group.instances, fractions, before.keep - {index})
                tried_s = measure(regions, tried, limits, inputs_swapped=inputs_swapped).step_s
                if tried_s <= step_s:
                    step_s = tried_s
                else:
                    parts[at] = before
    assert without_idle(regions, plan, limits) == measure(regions, tried, limits, inputs_swapped=inputs_swapped)


def test_kept_outputs_leave_copies_less_room_to_lag():
    """With 40 of 50 device bytes kept, only 10 bytes of copies may lag.

    So 90 of 100 bytes have to be sent during the first layer. At 5 bytes/s its 10 s become 18 s.
    """
    swapped = plans.operator("attention", (0,), (1,), size=100, capture="whole")
    kept = plans.operator("norm", (0,), (2,), size=40, capture="whole")
    layers = plans.region(swapped, kept, saved={1, 2}, instances=2)
    limits = plans.budget(d2h=5.0, device=50)
    for keep, forward_s in (((), 20.0), ((1,), 28.0)):
        groups = [group_of(layers, 1, {0: 1.0}, keep), group_of(layers, 1, {}, ())]
        assert measure([layers], [groups], limits, inputs_swapped=False).forward_s == pytest.approx(forward_s)


def test_operator_needed_by_two_outputs_is_counted_once():
    """Prefetching the input's 250 bytes takes 25 s, 5 s more than backward.

    Both outputs need the result of one operator, which takes 4 s. It runs once in these 5 s, so keeping the outputs
    gains nothing.
    """
    maker = plans.operator("norm", (0,), (1,), time_s=4.0, capture="never")
    outputs = [plans.operator("mm", (1,), (storage,), size=100) for storage in (2, 3)]
    layer = plans.region(maker, *outputs, saved={2, 3}, input_bytes=250)
    limits = plans.budget(h2d=10.0, device=200)
    plan = measure([layer], [[group_of(layer, 1, {}, (1, 2))]], limits, inputs_swapped=True)
    (group,) = without_idle([layer], plan, limits).regions["layer"].groups
    assert not group.keep and group.runs == {0, 1, 2}


def test_kept_output_is_dropped_if_it_delays_costlier_copies():
    """The kept output delays the first layer's copies by 8 s; running its operator again takes 5 s."""
    swapped = plans.operator("attention", (0,), (1,), time_s=100.0, size=100, capture="whole")
    kept = plans.operator("norm", (0,), (2,), time_s=5.0, size=40, capture="whole")
    layers = plans.region(swapped, kept, saved={1, 2}, instances=2)
    limits = plans.budget(d2h=5.0, device=50)
    groups = [group_of(layers, 1, {0: 1.0}, (1,)), group_of(layers, 1, {}, ())]
    plan = measure([layers], [groups], limits, inputs_swapped=False)
    thinner = without_idle([layers], plan, limits)
    assert thinner.step_s == pytest.approx(plan.step_s - 3.0)
    assert not thinner.regions["layer"].groups[0].keep
