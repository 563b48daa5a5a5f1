"""The sums, maxima, places and words that `memplug show` derives from a trace."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.figures.groups import BEFORE, phase_words
from memplug.profile.trace import EventKind, cut
from memplug.profile.trace_file import load
from memplug.show.summary import rows, summary
from memplug.show.timeline import timeline
from memplug.show.words import TraceMoment, moment
from memplug.words import axis_unit, size
from tests.support.rows import requests
from tests.support.show_traces import MIB, odd_trace, training_trace
from tests.support.traces import LEGACY, Recording, recordings, training


def test_summary_states_peak_operators_and_steps_of_a_training():
    trace = training_trace(layers=4, micro_batches=2, steps=3, unit_bytes=8 * MIB, base_bytes=96 * MIB)
    facts = summary(trace)
    # Each layer has two units of gradients and, as the second backward begins, six of activations; one more is made.
    peak_bytes = 96 * MIB + 8 * MIB * (2 * 4 + 6 * 4 + 1)
    assert facts["peak_bytes"] == facts["allocator_peak_bytes"] == peak_bytes
    assert facts["replays_exactly"] is True
    assert facts["peak_bytes_by_phase"] == {
        "forward of micro-batch 1": 6 * 4 * 8 * MIB,
        BEFORE: 96 * MIB,
        "backward of micro-batch 0": 2 * 4 * 8 * MIB,
        "backward of micro-batch 1": 8 * MIB,
    }
    by_layer = {f"model.layers.{i}": 8 * 8 * MIB for i in range(3)}
    assert facts["peak_bytes_by_layer"] == {BEFORE: 96 * MIB, "model.layers.3": 9 * 8 * MIB, **by_layer}
    operators_a_step = 1 + 2 * 2 * 4 * 5 + 2 * 4
    assert facts["peak_at"] == {
        "step": 0,
        "event": facts["peak_at"]["event"],
        "operator": 1 + 3 * 4 * 5,
        "operator_name": "aten::mm",
        "phase": "backward of micro-batch 1",
        "layer": "model.layers.3",
    }
    assert trace.live_bytes[facts["peak_at"]["event"]] == peak_bytes
    assert (facts["steps"], facts["step_s"]) == (3, [0.5] * 3)
    assert (facts["operators"], facts["operators_by_step"]) == (3 * operators_a_step, [operators_a_step] * 3)
    assert facts["top_operators"][0] == {"name": "aten::mm", "count": 3 * (2 * 4 + 2 * 4 * 5)}
    assert facts["live_at_end_requests"] == facts["live_at_end_bytes"] == 0
    dynamic = [request for request in requests(trace) if request.malloc_layer == trace.layers[3]]
    assert facts["dynamic_requests"] == len(dynamic)
    assert facts["dynamic_share"] == sum(request.nbytes for request in dynamic) / facts["requested_bytes"]
    assert facts["fingerprint"]["digest"] == trace.fingerprint.digest()


@given(recordings(), st.sampled_from((0, 7, 2**30)))
def test_bytes_by_phase_and_by_layer_add_up_to_the_peak(recording, base_bytes):
    trace = recording.trace(base_bytes=base_bytes)
    facts = summary(trace)
    assert facts["peak_bytes"] == max([base_bytes, *trace.live_bytes.tolist()])
    assert sum(facts["peak_bytes_by_phase"].values()) == facts["peak_bytes"]
    assert sum(facts["peak_bytes_by_layer"].values()) == facts["peak_bytes"]
    assert json.loads(json.dumps(facts)) == {**facts, "fingerprint": json.loads(json.dumps(facts["fingerprint"]))}
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in rows(facts))


def test_summary_states_difference_between_replay_and_allocator_counter():
    recording = training()
    highest = recording.trace().replayed_peak()[1]
    words = {
        counted: dict(rows(summary(recording.trace(peak_bytes=counted))))["  allocator's counter"]
        for counted in (0, highest, highest + 5, highest - 1)
    }
    assert words[0] == "unknown, not recorded"
    assert words[highest] == "the same, to the byte"
    assert words[highest + 5] == f"{highest + 5:,} bytes, 5 more than the requests give"
    assert words[highest - 1] == f"{highest - 1:,} bytes, 1 fewer than the requests give"


def test_summary_counts_live_requests_and_frees_by_other_threads():
    recording = Recording()
    freed, _ = recording.malloc(10, thread=0), recording.malloc(20, thread=1, stream=1)
    recording.free(freed, thread=2)
    recording.free(-1, 7)
    facts = summary(recording.trace(base_bytes=100))
    assert (facts["freed_by_another_thread_requests"], facts["freed_by_another_thread_bytes"]) == (1, 10)
    assert (facts["live_at_end_requests"], facts["live_at_end_bytes"]) == (1, 20)
    assert (facts["earlier_requests_freed"], facts["streams"], facts["base_bytes"]) == (1, 2, 100)


def test_summary_stays_short_with_many_layers():
    text = rows(summary(training_trace(layers=40)))
    by_layer = [name for name, _ in text].index("  by layer")
    assert text[by_layer + 7][1].endswith(f"{41 - 7} others, at most 64.00 MiB each")
    assert text[by_layer + 8][0] == "live at the end"


@given(recordings(), st.sampled_from((0, 7, 2**30)), st.integers(1, 12))
def test_timelines_by_phase_and_by_layer_add_up_to_the_replayed_bytes(recording, base_bytes, bins):
    trace = recording.trace(base_bytes=base_bytes)
    line = timeline(trace, bins)
    replayed = np.append(trace.live_bytes, base_bytes)[line.event]  # index -1: before the first event
    assert line.bytes_by_phase.sum(axis=0).tolist() == line.bytes_by_layer.sum(axis=0).tolist() == replayed.tolist()
    event, peak_bytes = trace.replayed_peak()
    assert (line.event[line.peak], line.in_use_bytes[line.peak]) == (event, peak_bytes)
    assert (line.at[0], line.at[-1]) == (0, line.length)
    assert line.length == 0 or (np.diff(line.at) > 0).all()
    assert len(line.at) <= 4 * bins + 2


def test_each_timeline_bin_keeps_its_highest_and_lowest_memory():
    trace, bins = load(LEGACY[1]), 50
    line = timeline(trace, bins)
    assert len(line.at) < len(trace.events) / 50
    edges = np.linspace(0, line.length, bins + 1)
    places = np.arange(len(trace.events)) + 0.5
    for begin, end in zip(edges, edges[1:], strict=False):
        drawn = line.in_use_bytes[(line.at >= begin) & (line.at < end) & (line.event >= 0)]
        replayed = trace.live_bytes[(places >= begin) & (places < end)]
        assert (drawn.max(), drawn.min()) == (replayed.max(), replayed.min())


def test_group_of_a_phase_has_the_bytes_of_its_live_requests():
    trace = training_trace(layers=2, micro_batches=2)
    line = timeline(trace)
    requests = trace.requests
    for group, each in enumerate(line.phases.groups[1:], start=1):
        for sample in range(0, len(line.at), 5):
            event = line.event[sample]
            live = (requests["malloc_event"] <= event) & (
                (requests["free_event"] < 0) | (requests["free_event"] > event)
            )
            mine = [phase_words(trace.phases[phase]) == each.label for phase in requests["malloc_phase"]]
            assert line.bytes_by_phase[group, sample] == requests["nbytes"][live & mine].sum()


def test_frees_of_earlier_requests_reduce_pre_existing_memory():
    line = timeline(odd_trace())
    before = [group.label for group in line.phases.groups].index(BEFORE)
    assert line.bytes_by_phase[before].tolist() == line.bytes_by_layer[before].tolist()
    assert (line.bytes_by_phase[before, 0], line.bytes_by_phase[before, -1]) == (5 * MIB, 3 * MIB)


def test_events_are_drawn_in_order_between_their_operators():
    recording = Recording()
    request = recording.malloc(1)  # made before the first operator, so drawn at it
    recording.op("aten::a")
    recording.op("aten::b")
    recording.free(request)
    recording.malloc(2)
    line = timeline(recording.trace())
    assert (line.clock, line.length) == ("operator", 2)
    assert line.at.tolist() == [0, 0.5, 1 + 1 / 3, 1 + 2 / 3, 2]


def test_clock_counts_requests_if_the_trace_has_no_operators():
    trace = load(LEGACY[0])
    line = timeline(trace)
    assert (line.clock, line.length) == ("request event", len(trace.events))
    assert line.step_starts == tuple(event for _, event, _ in trace.steps)


@pytest.mark.parametrize(
    "nbytes, words",
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1.00 KiB"), (3 * 2**19, "1.50 MiB"), (27.25 * 2**30, "27.25 GiB")],
)
def test_sizes_are_written_in_the_largest_unit_that_fits(nbytes, words):
    assert size(int(nbytes)) == words
    assert axis_unit(int(nbytes))[0] in ("KiB", *words.split())


def test_moment_names_the_step_only_if_the_trace_has_several():
    trace = training(steps=2).trace()
    event = int(np.flatnonzero(trace.events["kind"] == EventKind.FREE)[-1])
    assert str(moment(trace, event)) == "step 1, backward of micro-batch 1, layers.0, aten::mul (operator 33)"
    assert moment(cut(trace, 1), 0).step is None
    assert moment(trace, -1) == TraceMoment() and str(TraceMoment()) == BEFORE
    assert str(moment(load(LEGACY[0]), 3)) == "step 0, forward or backward 0, request event 3"
