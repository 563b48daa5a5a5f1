"""The layout problem of a step is what its events say of its static requests, and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.errors import LayoutError
from memplug.plan.layout.from_trace import last_step, problem_of
from memplug.plan.layout.problem import BUFFER
from memplug.profile.trace import Event, Layer, Pass
from memplug.profile.trace_file import load
from tests.traces import DATA, Recording, assert_same, recordings, training


def replayed(trace, step, alignment):
    """The rows that are due, from a walk over the events of one step of a trace, and their ids."""
    during = trace.step_events(step) if trace.steps else slice(0, len(trace.events))
    events = trace.events[during]
    rows, of_request = [], {}
    for time, event in enumerate(events):
        if event["kind"] == Event.MALLOC:
            layer = int(event["layer"])
            place = {"lower": time, "lower_phase": int(event["phase"]), "lower_layer": layer}
            of_request[int(event["request"])] = row = {
                "number": len(of_request),
                "stream": int(event["stream"]),
                **place,
            }
            row |= {"nbytes": int(event["nbytes"]), "dynamic": layer >= 0 and trace.layers[layer].dynamic}
            rows.append(row)
        elif int(event["request"]) in of_request:
            freed = {"upper": time, "upper_phase": int(event["phase"]), "upper_layer": int(event["layer"])}
            of_request[int(event["request"])].update(freed)
    found, ids = [], []
    for row in rows:
        if row["dynamic"] or not row["nbytes"]:
            continue
        if "upper" not in row:
            row |= {"lower": 0, "upper": len(events), "upper_phase": -1, "upper_layer": -1, "outlives": True}
        row["size"] = (row["nbytes"] + alignment - 1) // alignment * alignment
        found.append(tuple({"outlives": False, "alignment": alignment, **row}[name] for name in BUFFER.names))
        ids.append(row["number"])
    return found, ids


@given(recordings(), st.sampled_from((1, 2, 512)), st.data())
def test_a_problem_is_what_a_walk_over_the_events_finds(recording, alignment, data):
    trace = recording.trace()
    count = max(len(trace.steps), 1)
    step = data.draw(st.integers(-count, count - 1))
    problem = problem_of(last_step(trace, step), alignment)
    rows, ids = replayed(trace, step, alignment)
    assert problem.buffers.tolist() == rows
    assert problem.ids.tolist() == ids
    assert (problem.phases, problem.layers, problem.fingerprint) == (trace.phases, trace.layers, trace.fingerprint)
    assert len(problem.orderings) == 0


def test_the_last_step_is_taken_unless_another_is_asked_for():
    recording = Recording()
    for nbytes in (100, 200, 300):
        recording.step()
        recording.free(recording.malloc(nbytes))
    trace = recording.trace()
    sizes = [problem_of(last_step(trace, step), 1).buffers["size"].tolist() for step in (None, -1, 2, 0, -3)]
    assert sizes == [[300], [300], [300], [100], [100]]


def test_a_trace_without_steps_is_one_step():
    recording = Recording()
    recording.free(recording.malloc(100))
    trace = recording.trace()
    for step in (None, 0, -1):
        assert_same(last_step(trace, step), trace)
    assert problem_of(last_step(trace)).buffers["upper"].tolist() == [1]


@pytest.mark.parametrize(("steps", "step"), [(2, 2), (2, -3), (1, 1), (0, 1)])
def test_a_step_that_is_none_says_how_many_there_are(steps, step):
    with pytest.raises(LayoutError, match=f"has {max(steps, 1)} step.* step {step} ") as refused:
        last_step(training(steps=steps).trace(), step)
    assert f"from 0 to {max(steps, 1) - 1}" in refused.value.advice


def test_sizes_and_offsets_are_multiples_of_the_granularity():
    recording = Recording()
    for nbytes in (1, 511, 512, 513):
        recording.malloc(nbytes)
    problem = problem_of(recording.trace())
    assert problem.buffers["size"].tolist() == [512, 512, 512, 1024]
    assert problem.buffers["alignment"].tolist() == [512] * 4


def test_what_outlives_the_step_is_in_use_all_of_it():
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


def test_dynamic_requests_and_those_of_no_bytes_get_no_address():
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


def test_streams_that_would_be_taken_for_each_other_are_an_error():
    recording = Recording()
    recording.malloc(8, stream=2**32)
    with pytest.raises(LayoutError, match="stream 4294967296"):
        problem_of(recording.trace())


def test_bytes_that_cannot_be_placed_are_an_error():
    recording = Recording()
    recording.malloc(2**61)
    with pytest.raises(LayoutError, match="more than fits"):
        problem_of(recording.trace())


def test_a_recorded_step_needs_what_its_requests_have_in_use_at_once():
    step = last_step(load(DATA / "mixtral_ckpt.npz"))
    problem = problem_of(step)
    assert len(problem) == len(step.requests) == 3234
    walked, _ = replayed(step, 0, 512)
    live = np.zeros(len(step.events), np.int64)
    for row in walked:
        lower, upper, size = row[:3]
        live[lower:upper] += size
    assert problem.lower_bound == live.max() == 3_073_472_000
