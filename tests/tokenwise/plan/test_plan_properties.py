"""Properties that hold for the plan of any problem."""

from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplug.tokenwise.plan.solver import InFlight, solve
from tests.support.plans import GAP, MIB, budgets, layers, problems

alphas = st.one_of(st.just("auto"), st.floats(0.0, 1.0))


def rebuilt(layer, group):
    """Return the storages that are whole after a group's recompute pass; fail if an operator lacks its inputs."""
    there = set(layer.given)
    for index, op in enumerate(layer.operators):
        if index in group.runs:
            assert set(op.inputs) <= there, f"{op.name} runs without its inputs"
            there.update(op.outputs)
        elif index in group.keep or group.fractions.get(index) == 1.0:
            there.update(op.outputs)
    return there


@given(problems, budgets, alphas)
@settings(max_examples=120, deadline=None)
def test_every_plan_is_feasible_within_its_budgets(regions, limits, alpha):
    plan = solve(regions, limits, alpha)
    assert plan.host_bytes <= limits.host_bytes
    assert plan.device_bytes <= limits.device_bytes
    for layer in regions:
        groups = plan.regions[layer.key].groups
        assert sum(group.instances for group in groups) == layer.instances
        for group in groups:
            assert layer.saved <= rebuilt(layer, group)
            assert not group.keep & group.fractions.keys()
            for index in group.keep | group.fractions.keys():
                op = layer.operators[index]
                assert op.capture == "rows" or op.capture == "whole" and group.fractions.get(index, 1.0) == 1.0
    assert sum(part.forward_s for part in plan.regions.values()) == pytest.approx(plan.forward_s)
    assert sum(part.backward_s for part in plan.regions.values()) == pytest.approx(plan.backward_s)


@given(problems, budgets, st.integers(1, 2), st.integers(0, 2), st.sampled_from([0, 40, 1000]))
@settings(max_examples=120, deadline=None)
def test_kept_and_in_flight_bytes_and_buffers_fit_the_device(regions, limits, in_flight, buffers, room):
    """Expect a plan for every device size, since recomputing everything needs no memory in flight."""
    limits = replace(limits, in_flight=(InFlight(in_flight, room), InFlight(1, 20)), buffers=buffers)
    plan = solve(regions, limits)
    most, kept_bytes = 0, 0
    for layer in regions:
        groups = plan.regions[layer.key].groups
        kept_bytes += (
            sum(group.instances * group.kept_bytes for group in groups) + layer.staying * groups[-1].kept_bytes
        )
        safest = sum(op.output_bytes for op in layer.operators if op.always_swapped and not op.always_runs)
        for group in groups:
            most = max(most, sum(layer.operators[index].output_bytes for index in group.fractions) - safest)
    beyond_room = max(0, in_flight * most - room, most - 20)
    assert (plan.kept_bytes, plan.in_flight_bytes) == (kept_bytes, beyond_room)
    assert plan.device_bytes == kept_bytes + beyond_room <= limits.device_bytes - buffers * most
    assert plan.step_s >= solve(regions, replace(limits, in_flight=(), buffers=0)).step_s / GAP


@given(problems, budgets, st.integers(0, 200).map(MIB.__mul__), st.integers(0, 200).map(MIB.__mul__))
@settings(max_examples=80, deadline=None)
def test_more_in_flight_room_never_makes_the_step_longer(regions, limits, room, more):
    """A tensor in flight takes room for all of its rows, even if only some of them are swapped."""
    less, larger = (
        solve(regions, replace(limits, in_flight=(InFlight(2, each), InFlight(1)))) for each in (room, room + more)
    )
    assert larger.step_s <= less.step_s * GAP


@given(problems, budgets, st.floats(0.0, 1.0))
@settings(max_examples=80, deadline=None)
def test_automatic_plan_is_never_worse_than_fixed_alpha_or_recompute(regions, limits, alpha):
    best = solve(regions, limits)
    for other in (0.0, alpha, 1.0):
        assert best.step_s <= solve(regions, limits, other).step_s * GAP
    inputs = sum(layer.instances * layer.input_bytes for layer in regions) if best.inputs_swapped else 0
    forward_s = sum((layer.instances + layer.staying) * layer.forward_s for layer in regions)
    again_s = sum((layer.instances + layer.staying) * sum(o.time_s for o in layer.operators) for layer in regions)
    all_again_s = max(forward_s, inputs / limits.d2h_bytes_per_s) + max(
        2.0 * forward_s + again_s, inputs / limits.h2d_bytes_per_s
    )
    assert best.step_s <= all_again_s * GAP


@given(problems, budgets, st.floats(1.0, 4.0), st.integers(0, 500).map(MIB.__mul__))
@settings(max_examples=80, deadline=None)
def test_more_bandwidth_or_memory_never_makes_the_step_longer(regions, limits, faster, more_bytes):
    """Begin with enough host memory for all inputs.

    If all inputs fit, they must be swapped. If they do not fit, none is swapped, and the step may be shorter. So the
    property holds only from that amount of memory on.
    """
    inputs = sum(layer.instances * layer.input_bytes for layer in regions)
    limits = replace(limits, host_bytes=inputs + limits.host_bytes)
    step_s = solve(regions, limits).step_s
    for better in (
        replace(limits, d2h_bytes_per_s=limits.d2h_bytes_per_s * faster),
        replace(limits, h2d_bytes_per_s=limits.h2d_bytes_per_s * faster),
        replace(limits, host_bytes=limits.host_bytes + more_bytes),
        replace(limits, device_bytes=limits.device_bytes + more_bytes),
    ):
        assert solve(regions, better).step_s <= step_s * GAP


@given(layers(), budgets)
@settings(max_examples=80, deadline=None)
def test_no_choice_of_whole_outputs_beats_the_plan(layer, limits):
    """Price every subset of outputs as swapped whole in all instances.

    The operators that the other saved outputs need run again.
    """
    limits = replace(limits, host_bytes=limits.host_bytes + layer.instances * layer.input_bytes, device_bytes=0)
    capturable = [i for i, op in enumerate(layer.operators) if op.capture != "never"]
    best_s = float("inf")
    for chosen in chain.from_iterable(combinations(capturable, k) for k in range(len(capturable) + 1)):
        runs = set()

        def make(storage, runs=runs, chosen=chosen):
            maker = storage - 1
            if storage and maker not in chosen and maker not in runs:
                run(maker, runs, make)

        def run(maker, runs, make):
            runs.add(maker)
            for storage in layer.operators[maker].inputs:
                make(storage)

        for index, op in enumerate(layer.operators):
            if op.always_runs and index not in runs:
                run(index, runs, make)
        for storage in layer.saved:
            make(storage)
        size = layer.instances * (layer.input_bytes + sum(layer.operators[i].output_bytes for i in chosen))
        if size <= limits.host_bytes:
            again_s = sum(layer.operators[i].time_s for i in runs)
            every = layer.instances + layer.staying
            forward_s = max(every * layer.forward_s, size / limits.d2h_bytes_per_s)
            backward_s = max(every * (layer.backward_s + again_s), size / limits.h2d_bytes_per_s)
            best_s = min(best_s, forward_s + backward_s)
    assert solve([layer], limits).step_s <= best_s * GAP
