"""Dynamic requests may reuse exactly the bytes that no planned buffer uses while they live."""

import numpy as np
import pytest
from hypothesis import given

from memplug.arena.judge import judge_addresses
from memplug.arena.plan import auto
from memplug.arena.plan.dynamic import dynamic_peak_bytes, dynamic_spaces, served
from memplug.arena.plan.from_trace import last_step, problem_of
from memplug.arena.plan.part import address_plan
from memplug.profile.trace import Pass, Trace
from tests.support.schedules import Schedule, record
from tests.support.traces import Recording, recordings


def planned(step: Trace):
    problem = problem_of(step)
    solution = auto.plan(problem, time_limit_s=0.1)
    return problem, solution, dynamic_spaces(step, problem, solution)


def two_layers(*, frees: bool = True) -> Trace:
    """Return a step with static requests, and requests of experts in forward, which backward frees if `frees`."""
    recording = Recording()
    recording.step()
    recording.phase(Pass.FORWARD, 0)
    recording.layer("static")
    first = recording.malloc(512 * 8)
    recording.layer("experts", dynamic=True)
    dynamic = [recording.malloc(700), recording.malloc(300)]
    recording.layer("static")
    second = recording.malloc(512 * 4)
    recording.free(first)
    recording.phase(Pass.BACKWARD, 0)
    recording.layer("experts", dynamic=True)
    for request in dynamic if frees else ():
        recording.free(request)
    recording.layer("static")
    third = recording.malloc(512 * 16)
    recording.free(third)
    recording.free(second)
    return recording.trace()


def test_dynamic_group_may_reuse_all_bytes_free_during_its_lifetime():
    step = two_layers()
    problem, solution, (group,) = planned(step)
    assert (group.lower, group.upper) == (1, 7), "from its first malloc to its last free"
    assert group.requests == 2 and group.peak_bytes == 1024 + 512 == dynamic_peak_bytes(step)
    assert solution.height == 512 * 20 and sum(end - first for first, end in group.spaces) == 512 * 8
    assert judge_addresses(address_plan(problem, solution, (group,), dynamic_peak_bytes(step))) == ()


def test_unfreed_dynamic_requests_last_to_the_end_of_the_step():
    step = two_layers(frees=False)
    _, _, (group,) = planned(step)
    assert (group.free_phase, group.free_layer, group.upper) == (-1, -1, len(step.events))


def test_only_dynamic_requests_that_fit_are_served():
    step = two_layers()
    _, solution, (group,) = planned(step)
    assert served(step, (group,)) == (2, 1024 + 512)
    tight = type(group)(**{**{name: getattr(group, name) for name in group.__slots__}, "spaces": ((512, 1200),)})
    assert served(step, (tight,)) == (1, 512)
    nothing = type(group)(**{**{name: getattr(group, name) for name in group.__slots__}, "spaces": ()})
    assert served(step, (nothing,)) == (0, 0)
    assert solution.height > 0


def test_step_without_dynamic_requests_has_no_reusable_space():
    recording = Recording()
    recording.step()
    recording.free(recording.malloc(100))
    step = recording.trace()
    assert planned(step)[2] == () and dynamic_peak_bytes(step) == 0 and served(step, ()) == (0, 0)


@given(recordings())
def test_reusable_space_is_exactly_what_no_buffer_uses_in_its_interval(recording):
    trace = recording.trace()
    step = last_step(trace)
    problem, solution, spaces = planned(step)
    requests = step.requests[step.requests["dynamic"] & (step.requests["nbytes"] > 0)]
    requests = requests[requests["malloc_thread"] == 0]
    assert sum(group.requests for group in spaces) == len(requests)
    for group in spaces:
        lives = (problem.buffers["lower"] < group.upper) & (group.lower < problem.buffers["upper"])
        edges = sorted({0, solution.height, *solution.offsets, *(solution.offsets + problem.buffers["size"])})
        for first, end in zip(edges, edges[1:], strict=False):
            used = lives & (solution.offsets <= first) & (end <= solution.offsets + problem.buffers["size"])
            inside = any(low <= first and end <= high for low, high in group.spaces)
            assert inside is not bool(used.any())
        place = requests[requests["malloc_layer"] == group.malloc_layer]
        place = place[place["malloc_phase"] == group.malloc_phase]
        members = place[np.isin(place["malloc_event"], group.mallocs)]
        assert len(members) == group.requests
        for column in ("free_layer", "free_phase", "stream"):
            assert (members[column] == getattr(group, column)).all()
        assert (members["malloc_event"] >= group.lower).all() and (members["free_event"] < group.upper).all()
    assert judge_addresses(address_plan(problem, solution, spaces, dynamic_peak_bytes(step))) == ()
    count, nbytes = served(step, spaces)
    assert 0 <= count <= len(requests) and nbytes <= (-(-requests["nbytes"] // 512) * 512).sum()


@pytest.mark.parametrize("recompute", [True, False])
def test_reusable_space_serves_some_requests_of_experts(recompute):
    step = record(Schedule(source="mixtral_ckpt", layers=2, micro_batches=4, dynamic=True, recompute=recompute))
    problem, solution, spaces = planned(step)
    assert judge_addresses(address_plan(problem, solution, spaces, dynamic_peak_bytes(step))) == ()
    count, nbytes = served(step, spaces)
    dynamic = step.requests["dynamic"]
    assert 0 < count < dynamic.sum() and 0 < nbytes < step.requests["nbytes"][dynamic].sum()
    assert len(spaces) == len(
        np.unique([(g.malloc_phase, g.malloc_layer, g.free_phase, g.free_layer) for g in spaces], axis=0)
    )
