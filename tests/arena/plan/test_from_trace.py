"""The layout problem of a step follows from the events of its static requests alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.arena.plan.from_trace import last_step, problem_of
from memplug.arena.plan.problem import BUFFER
from memplug.errors import LayoutError
from memplug.profile.scaling import CONSTANT
from memplug.profile.trace import EventKind, Layer, Pass
from memplug.profile.trace_file import load
from tests.support.folders import DATA
from tests.support.traces import Recording, assert_same, recordings, training

OUTLIVES = BUFFER.names.index("outlives")


def replayed(trace, step, alignment):
    """Walk over the events of one step, and return the expected rows of the problem and their ids."""
    during = trace.step_events(step) if trace.steps else slice(0, len(trace.events))
    events = trace.events[during]
    rows, of_request = [], {}
    for time, event in enumerate(events):
        if event["kind"] == EventKind.MALLOC:
            layer = int(event["layer"])
            place = {"lower": time, "lower_phase": int(event["phase"]), "lower_layer": layer}
            of_request[int(event["request"])] = row = {
                "number": len(of_request),
                "stream": int(event["stream"]),
                **place,
            }
            row |= {"nbytes": int(event["nbytes"]), "dynamic": layer >= 0 and trace.layers[layer].dynamic}
            row |= {"elsewhere": bool(event["thread"])}
            rows.append(row)
        elif int(event["request"]) in of_request:
            lower = of_request[int(event["request"])]["lower"]
            upper = min(2 * time - lower, len(events)) if event["thread"] else time
            freed = {"upper": upper, "upper_phase": int(event["phase"]), "upper_layer": int(event["layer"])}
            of_request[int(event["request"])].update(freed)
    found, ids = [], []
    for row in rows:
        if row["dynamic"] or row["elsewhere"] or not row["nbytes"]:
            continue
        if "upper" not in row:
            row |= {"lower": 0, "upper": len(events), "upper_phase": -1, "upper_layer": -1, "outlives": True}
        row["size"] = (row["nbytes"] + alignment - 1) // alignment * alignment
        unscaled = {"term": CONSTANT, "base": 0, "factor": 0}
        whole = {"outlives": False, "room": False, "alignment": alignment, **unscaled, **row}
        found.append(tuple(whole[name] for name in BUFFER.names))
        ids.append(row["number"])
    return found, ids


def extra_buffers(trace, step, alignment, rows, ids):
    """Count the extra buffers, for each (size, stream), that `rows` of requests that outlive the step need."""
    during = trace.step_events(step) if trace.steps else slice(0, len(trace.events))
    events = trace.events[during]
    numbers = np.cumsum(events["kind"] == EventKind.MALLOC) - 1
    kept = {number: (row[2], row[4]) for number, row in zip(ids, rows, strict=True) if row[OUTLIVES]}
    nbytes = last_step(trace, step).events["nbytes"]
    due = {kind: list(kept.values()).count(kind) for kind in kept.values()}
    left = {kind: 0 for kind in due}
    born = set(events["request"][events["kind"] == EventKind.MALLOC].tolist())
    live, most = {kind: 0 for kind in due}, {kind: 0 for kind in due}
    for time, event in enumerate(events):
        size = (int(nbytes[time]) + alignment - 1) // alignment * alignment
        kind = (size, int(event["stream"]))
        if event["kind"] == EventKind.MALLOC and int(numbers[time]) in kept:
            live[kind] += 1
            most[kind] = max(most[kind], live[kind])
        elif event["kind"] == EventKind.FREE and int(event["request"]) not in born and size:
            if kind in left and left[kind] < due[kind]:
                left[kind] += 1
                live[kind] -= 1
    return {kind: more for kind in due if (more := max(0, most[kind] + left[kind] - due[kind]))}


@given(recordings(), st.sampled_from((1, 2, 512)), st.data())
def test_problem_matches_a_walk_over_the_events(recording, alignment, data):
    trace = recording.trace()
    count = max(len(trace.steps), 1)
    step = data.draw(st.integers(-count, count - 1))
    problem = problem_of(last_step(trace, step), alignment)
    rows, ids = replayed(trace, step, alignment)
    assert problem.buffers[: len(rows)].tolist() == rows
    left = problem.buffers[len(rows) :]
    assert problem.ids.tolist() == [*ids, *range(-1, -len(left) - 1, -1)]
    assert left["outlives"].all() and (left["lower"] == 0).all() and (left["lower_layer"] == -1).all()
    kinds, counts = np.unique(left[["size", "stream"]], return_counts=True)
    more = dict(zip(kinds.tolist(), counts.tolist(), strict=True))
    assert more == extra_buffers(trace, step, alignment, rows, ids)
    assert (problem.phases, problem.layers, problem.fingerprint) == (trace.phases, trace.layers, trace.fingerprint)
    assert len(problem.orderings) == 0


def test_last_step_is_the_default():
    recording = Recording()
    for nbytes in (100, 200, 300):
        recording.step()
        recording.free(recording.malloc(nbytes))
    trace = recording.trace()
    sizes = [problem_of(last_step(trace, step), 1).buffers["size"].tolist() for step in (None, -1, 2, 0, -3)]
    assert sizes == [[300], [300], [300], [100], [100]]


def test_trace_without_steps_counts_as_one_step():
    recording = Recording()
    recording.free(recording.malloc(100))
    trace = recording.trace()
    for step in (None, 0, -1):
        assert_same(last_step(trace, step), trace)
    assert problem_of(last_step(trace)).buffers["upper"].tolist() == [1]


@pytest.mark.parametrize(("steps", "step"), [(2, 2), (2, -3), (1, 1), (0, 1)])
def test_missing_step_error_names_the_number_of_steps(steps, step):
    with pytest.raises(LayoutError, match=f"has {max(steps, 1)} step.* step {step} ") as refused:
        last_step(training(steps=steps).trace(), step)
    assert f"from 0 to {max(steps, 1) - 1}" in refused.value.advice


def test_sizes_are_rounded_up_to_512_bytes():
    recording = Recording()
    for nbytes in (1, 511, 512, 513):
        recording.malloc(nbytes)
    problem = problem_of(recording.trace())
    assert problem.buffers["size"].tolist() == [512, 512, 512, 1024]
    assert problem.buffers["alignment"].tolist() == [512] * 4


def test_request_that_outlives_the_step_is_in_use_throughout():
    recording = Recording()
    recording.step()
    recording.free(recording.malloc(8))
    kept = recording.malloc(8)
    recording.free(recording.malloc(8))
    recording.step()
    recording.free(kept)
    problem = problem_of(last_step(recording.trace(), 0))
    assert problem.buffers["outlives"].tolist() == [False, True, False]
    assert problem.buffers[["lower", "upper"]].tolist() == [(0, 1), (0, 5), (3, 4)]
    assert problem.buffers["upper_phase"].tolist() == [0, -1, 0]


def test_request_freed_after_its_successors_malloc_needs_an_extra_buffer():
    recording = Recording()
    recording.step()
    loss = recording.malloc(8)
    gradient = recording.malloc(600)
    for _ in range(2):
        recording.step()
        recording.free(gradient)
        gradient = recording.malloc(600)
        loss, former = recording.malloc(8), loss
        recording.free(former)
    problem = problem_of(last_step(recording.trace()))
    assert problem.buffers["size"].tolist() == [1024, 512, 512] and problem.buffers["outlives"].all()
    assert problem.ids.tolist() == [0, 1, -1]


def test_requests_of_other_threads_get_no_address():
    recording = Recording()
    recording.malloc(8)
    recording.malloc(8, thread=1)
    assert problem_of(recording.trace()).ids.tolist() == [0]


def test_margin_for_checks_is_part_of_each_buffer():
    recording = Recording()
    recording.malloc(8)
    recording.malloc(512)
    assert problem_of(recording.trace(), margin_bytes=512).buffers["size"].tolist() == [1024, 1024]


def test_dynamic_and_empty_requests_get_no_address():
    recording = Recording()
    recording.phase(Pass.FORWARD, 0)
    recording.layer("mlp")
    recording.malloc(1)
    recording.layer("experts", dynamic=True)
    recording.malloc(2)
    recording.layer(None)
    recording.malloc(0)
    recording.malloc(3, stream=2)
    problem = problem_of(recording.trace(), 1)
    assert problem.ids.tolist() == [0, 3]
    assert problem.buffers["stream"].tolist() == [0, 2]
    assert problem.layers == (Layer("mlp"), Layer("experts", dynamic=True))


def test_stream_that_does_not_fit_32_bits_raises():
    recording = Recording()
    recording.malloc(8, stream=2**32)
    with pytest.raises(LayoutError, match="stream 4294967296"):
        problem_of(recording.trace())


def test_request_too_large_to_place_raises():
    recording = Recording()
    recording.malloc(2**61)
    with pytest.raises(LayoutError, match="sizes are below 2"):
        problem_of(recording.trace())


def test_lower_bound_of_a_recorded_step_is_its_peak_of_live_bytes():
    step = last_step(load(DATA / "mixtral_ckpt.npz"))
    problem = problem_of(step)
    assert len(step.requests) == 3234 and len(problem) == 3236, "requests that outlast their successors need two more"
    walked, _ = replayed(step, 0, 512)
    live = np.zeros(len(step.events), np.int64)
    for row in [*walked, *problem.buffers[3234:].tolist()]:
        lower, upper, size = row[:3]
        live[lower:upper] += size
    assert problem.lower_bound == live.max() == 3_073_537_536
