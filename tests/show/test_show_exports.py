"""The files of `memplug show` for other viewers, read back: the snapshot by torch, and Chrome's events."""

from __future__ import annotations

import json
import pickle
import pickletools
from collections import defaultdict

import pytest
from hypothesis import given
from torch.cuda import _memory_viz

from memplug.errors import MemplugError
from memplug.profile.trace_file import load
from memplug.show import trace_events
from memplug.show.chrome import process_of, write_chrome
from memplug.show.snapshot import snapshot, write_snapshot
from tests.support.show_traces import MIB, odd_trace, training_trace
from tests.support.traces import LEGACY, Recording, recordings, training

# Opcodes that pytorch.org/memory_viz can unpickle, from MemoryViz.js in pytorch/pytorch.
OPCODES_OF_MEMORY_VIZ = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "NONE"),
    *("NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_DICT", "SETITEM", "SETITEMS", "DICT"),
    *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
}


def replayed(made: dict) -> tuple[int, dict[int, int]]:
    """Replay a snapshot; return its peak bytes, and the sizes by address of the blocks that are live at the end.

    Fail if live blocks overlap or lie outside of their segment.
    """
    (events,) = made["device_traces"]
    ranges = {each["address"]: each["total_size"] for each in made["segments"]}
    allocated = {event["addr"] for event in events if event["action"] == "alloc"}
    live, seen = {}, set()
    # Blocks from before the snapshot have no `alloc`; only their free, or the segments at the end, show them.
    for event in events:
        if event["action"] == "alloc":
            seen.add(event["addr"])
        elif event["action"] == "free_completed" and event["addr"] not in seen:
            live[event["addr"]] = event["size"]
            seen.add(event["addr"])
    for segment in made["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block["address"] not in seen | allocated:
                live[block["address"]] = block["requested_size"]
    highest = in_use = sum(live.values())
    for event in events:
        if event["action"] == "alloc":
            assert event["addr"] not in live
            assert any(
                0 <= event["addr"] - start and event["addr"] + event["size"] <= start + ranges[start]
                for start in ranges
            )
            live[event["addr"]] = event["size"]
            in_use += event["size"]
            highest = max(highest, in_use)
            at = sorted(live)
            assert all(a + live[a] <= b for a, b in zip(at, at[1:], strict=False)), "blocks overlap"
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
            in_use -= event["size"]
    return highest, live


@given(recordings())
def test_snapshot_blocks_never_overlap(recording):
    trace = recording.trace(base_bytes=2**41)
    made = snapshot(trace)
    given_back = int(trace.events["nbytes"][(trace.events["request"] < 0)].sum())
    highest, live = replayed(made)
    if given_back <= 2**41:
        assert highest == trace.replayed_peak()[1]
    for segment in made["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address and block["size"] >= block["requested_size"]
            address += block["size"]
        assert address == segment["address"] + segment["total_size"], "blocks add up to their segment"
    at_end = {
        block["address"]: block["requested_size"]
        for segment in made["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert live == at_end


@pytest.mark.parametrize("trace", [training_trace(), load(LEGACY[0]), odd_trace(), Recording().trace()])
def test_snapshot_is_readable_by_torch_and_memory_viz(tmp_path, trace):
    write_snapshot(trace, tmp_path / "snapshot.pickle")
    content = (tmp_path / "snapshot.pickle").read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= OPCODES_OF_MEMORY_VIZ
    assert content[:2] == b"\x80\x04", "later protocols are refused"
    made = pickle.loads(content)
    # torch's functions raise if blocks do not add up to their segments.
    assert f"segments: {len(made['segments'])}" in _memory_viz.segsum(made)
    events = made["device_traces"][0]
    assert not events or f"{len(events)} entries" in _memory_viz.trace(made)
    assert "snapshot.pickle" in _memory_viz.trace_plot(made) and _memory_viz.segment_plot(made)
    for segment in made["segments"]:
        for block in segment["blocks"]:
            frames, size = _memory_viz._block_extra(block)
            assert size == block["requested_size"] and _memory_viz._frames_fmt(frames) == [
                f"{frame['filename']}:{frame['line']}:{frame['name']}" for frame in frames
            ]


def test_snapshot_has_the_peak_of_its_trace_and_begins_with_a_segment():
    for trace in (training_trace(), load(LEGACY[0])):
        made = snapshot(trace)
        peak_bytes = trace.replayed_peak()[1]
        assert replayed(made)[0] == peak_bytes
        assert peak_bytes <= made["segments"][0]["total_size"] < 1.25 * peak_bytes, "addresses are used again"
        assert [event["action"] for event in made["device_traces"][0][:2]] == ["segment_alloc", "alloc"]


def test_snapshot_names_operator_layer_and_phase_of_each_request():
    trace = training_trace()
    allocations = [event for event in snapshot(trace)["device_traces"][0] if event["action"] == "alloc"]
    assert len(allocations) == len(trace.requests)
    assert allocations[3]["frames"] == [
        {"filename": "operator", "line": 2, "name": "aten::mm"},
        {"filename": "layer", "line": 0, "name": "model.layers.0"},
        {"filename": "phase", "line": 1, "name": "forward of micro-batch 0"},
    ]
    assert [each["size"] for each in allocations] == trace.requests["nbytes"].tolist()
    assert {each["category"] for each in allocations} == {"forward", "backward", "optimizer"}


def test_snapshot_has_the_category_that_memory_viz_requires():
    events = snapshot(training_trace())["device_traces"][0]
    assert "unknown" in {event.get("category") for event in events}


def test_snapshot_has_separate_segments_per_stream():
    made = snapshot(odd_trace())
    assert [segment["stream"] for segment in made["segments"]] == [0, 3]
    # 5 MiB from before the trace, of which 2 are freed; a request of 0 bytes takes 512.
    assert [segment["total_size"] for segment in made["segments"]] == [6 * MIB - 512, MIB + 512]
    assert [segment["requested_size"] for segment in made["segments"]] == [3 * MIB, MIB]


@pytest.fixture
def chrome(tmp_path):
    def write(trace) -> dict:
        write_chrome(trace, tmp_path / "trace.json")
        return json.loads((tmp_path / "trace.json").read_text())

    return write


@pytest.mark.parametrize("trace", [training_trace(steps=2), odd_trace(), training().trace()])
def test_chrome_trace_is_well_formed(chrome, trace):
    written = chrome(trace)
    assert (
        written["otherData"]["fingerprint"] == trace.fingerprint.digest()
        and "no end times" in written["otherData"]["note"]
    )
    tracks = defaultdict(list)
    for event in written["traceEvents"]:
        assert event["ph"] in "MXC" and event["pid"] == trace.fingerprint.rank + 1
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["tid"] >= 1
            tracks[event["tid"]].append(event)
    names = {
        event["tid"]: event["args"]["name"]
        for event in written["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert list(names.values()) == ["steps", "phases", "layers", "operators"]
    for events in tracks.values():
        for one, following in zip(events, events[1:], strict=False):
            assert one["ts"] + one["dur"] <= following["ts"] + 1e-6, "Perfetto drops what overlaps on a track"


def test_chrome_trace_nests_operators_in_layer_phase_and_step(chrome):
    trace = training_trace(layers=2, micro_batches=1, steps=2)
    tracks = defaultdict(list)
    for event in chrome(trace)["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["tid"]].append(event)
    steps, phases, layers, operators = (tracks[tid] for tid in (1, 2, 3, 4))
    assert [each["ts"] for each in operators] == (trace.operators["time_ns"] / 1000).tolist()
    assert [each["name"] for each in operators] == [trace.names[name] for name in trace.operators["name"]]
    assert all(each["dur"] == 1 for each in operators[:-1]), "up to the next operator"
    assert [each["name"] for each in steps] == ["step 0", "step 1"]
    assert steps[1]["dur"] == operators[-1]["ts"] + operators[-1]["dur"] - steps[1]["ts"] == 500_000, "as measured"
    assert [each["name"] for each in phases[:4]] == [
        "between passes",
        "forward of micro-batch 0",
        "backward of micro-batch 0",
        "optimizer",
    ]
    assert {each["name"] for each in layers} == {"model.layers.0", "model.layers.1"}
    assert layers[1]["args"] == {"dynamic": True}


def test_chrome_trace_counter_peaks_at_the_peak_operator():
    trace = training_trace()
    counter = [event for event in trace_events.events(process_of(trace)) if event["ph"] == "C"]
    highest = max(counter, key=lambda event: event["args"]["bytes"])
    event, peak_bytes = trace.replayed_peak()
    assert highest["args"]["bytes"] == peak_bytes
    assert highest["ts"] == trace.operators["time_ns"][trace.events["operator"][event]] / 1000
    assert counter[0] == {**counter[0], "ts": 0.0, "args": {"bytes": trace.base_bytes}}


@given(recordings())
def test_chrome_trace_has_a_span_for_each_recorded_operator(recording):
    if recording.operators:
        spans = [
            event
            for event in trace_events.events(process_of(recording.trace()))
            if event["ph"] == "X" and event["tid"] == 4
        ]
        assert len(spans) == len(recording.operators)


def test_chrome_trace_without_operators_is_refused(tmp_path):
    with pytest.raises(MemplugError, match="only memory requests"):
        write_chrome(load(LEGACY[0]), tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
