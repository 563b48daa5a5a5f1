"""A plan leaves room for dynamic requests, as much as any recorded step needed, for as long as they live."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.arena.judge import judge_addresses
from memplug.arena.plan import auto
from memplug.arena.plan.from_trace import problem_of
from memplug.arena.plan.rooms import SPARE, rooms, with_rooms
from memplug.arena.planning import plan_with_spaces, planned
from memplug.profile.trace import Pass, Trace
from memplug.profile.varying import observed
from memplug.sizes import BLOCK_BYTES
from tests.support.traces import Recording

KIB = 1024


def step(sizes: list[int], layers: int = 2) -> Trace:
    """Return a step whose experts save tensors of these sizes, in KiB, in each layer; backward frees them."""
    recording = Recording()
    recording.step()
    saved = []
    for layer in range(layers):
        recording.phase(Pass.FORWARD, 0)
        recording.layer(f"layers.{layer}")
        recording.op("mm")
        static = recording.malloc(64 * KIB)
        recording.layer(f"layers.{layer}.experts")
        for at, size in enumerate(sizes):
            recording.op(f"mm{at}")
            saved.append((layer, recording.malloc(size * KIB)))
        recording.layer(f"layers.{layer}")
        recording.op("add")
        recording.free(static)
    recording.phase(Pass.BACKWARD, 0)
    for layer, request in reversed(saved):
        recording.layer(f"layers.{layer}.experts")
        recording.op("backward")
        recording.free(request)
    return recording.trace()


def test_room_has_the_most_bytes_of_any_step_and_some_spare() -> None:
    first, others = observed(step([3, 5, 8]), [step([5, 4, 9]), step([2, 2, 2])])
    found = rooms(first, others)
    assert len(found) == 2 and found["room"].all()
    least = int((5 + 4 + 9) * KIB * (1 + SPARE))
    assert (least <= found["size"]).all() and (found["size"] < least + BLOCK_BYTES).all()
    for column in ("lower_layer", "upper_layer"):
        assert [first.layers[layer].name for layer in found[column]] == ["layers.0.experts", "layers.1.experts"]


def test_steps_of_equal_requests_need_no_room() -> None:
    first, others = observed(step([3, 5]), [step([3, 5])])
    assert len(rooms(first, others)) == 0
    problem = problem_of(first)
    assert len(with_rooms(problem, first, others)) == len(problem)


def test_rooms_that_take_too_many_bytes_are_left_out() -> None:
    first, others = observed(step([3, 5]), [step([300, 500])])
    problem = problem_of(first)
    assert len(rooms(first, others)) == 2 and len(with_rooms(problem, first, others)) == len(problem)


@given(st.lists(st.lists(st.integers(1, 40), min_size=3, max_size=3), min_size=2, max_size=4))
def test_every_recorded_step_finds_room_for_each_layers_experts(drawn: list[list[int]]) -> None:
    first, others = observed(step(drawn[-1]), [step(sizes) for sizes in drawn[:-1]])
    problem = problem_of(first)
    problem = problem.with_more(rooms(first, others))
    plan = plan_with_spaces(first, problem, auto.plan(problem, time_limit_s=0.1))
    assert judge_addresses(plan) == ()
    for trace in (first, *others):
        rows = trace.requests[trace.requests["dynamic"]]
        for layer in np.unique(rows["malloc_layer"]):
            of_it = rows[rows["malloc_layer"] == layer]
            name = trace.layers[layer]
            (free,) = [
                sum(end - begin for begin, end in group.spaces)
                for group in plan.dynamic
                if plan.problem.layers[group.malloc_layer] == name
            ]
            assert free >= of_it["nbytes"].sum()


@pytest.mark.parametrize("kept", [True, False])
def test_request_may_outlive_some_steps_and_not_others(kept: bool) -> None:
    def one(size: int, outlives: bool) -> Trace:
        recording = Recording()
        recording.step()
        recording.phase(Pass.FORWARD, 0)
        recording.layer("layers.0")
        recording.op("mm")
        requests = [recording.malloc(64 * KIB) for _ in range(3)]
        for request in requests[outlives:]:
            recording.free(request)
        recording.layer("layers.0.experts")
        recording.op("mm")
        recording.free(recording.malloc(size * KIB))
        return recording.trace()

    plan, _ = planned(one(5, kept), [one(9, not kept)], "auto", False)
    assert judge_addresses(plan) == ()
    (room,) = plan.problem.buffers[plan.problem.buffers["room"]]
    assert room["size"] >= 9 * KIB


def test_plan_of_varying_steps_has_rooms_among_its_buffers_but_not_its_requests() -> None:
    plan, tables = planned(step([30, 50, 80]), [step([50, 40, 70])], "auto", False)
    assert plan.problem.buffers["room"].sum() == 2
    assert len(tables.requests) == plan.problem.requests == len(plan.problem) - 2
    assert judge_addresses(plan) == ()
