"""A trace holds a whole recording, refuses an impossible one, and replays the bytes in use of the run."""

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.errors import TraceError
from memplug.profile.trace import (
    REQUEST,
    EventKind,
    Fingerprint,
    Layer,
    Pass,
    Phase,
    Trace,
    cut,
    earlier_frees,
    freed_elsewhere,
    live_bytes,
    requests,
    still_live,
)
from tests.support import rows
from tests.support.folders import ROOT
from tests.support.traces import Recording, recordings, training


def test_request_row_has_the_places_of_its_malloc_and_its_free():
    recording = Recording()
    recording.phase(Pass.FORWARD, 1)
    recording.layer("experts", dynamic=True)
    recording.op("aten::mm")
    number = recording.malloc(640, stream=3)
    recording.op("aten::add")
    recording.phase(Pass.BACKWARD, 1)
    recording.layer(None)
    recording.free(number, thread=2)
    request = rows.request(recording.trace(), 0)
    assert (request.number, request.nbytes, request.stream, request.dynamic) == (0, 640, 3, True)
    assert (request.malloc_event, request.free_event) == (0, 1)
    assert (request.malloc_operator, request.free_operator) == (0, 1)
    assert (request.malloc_phase, request.free_phase) == (Phase(Pass.FORWARD, 1), Phase(Pass.BACKWARD, 1))
    assert (request.malloc_layer, request.free_layer) == (Layer("experts", dynamic=True), None)
    assert (request.malloc_thread, request.free_thread) == (0, 2)
    assert request.freed_elsewhere and not request.still_live
    with pytest.raises(FrozenInstanceError):
        request.nbytes = 0


def test_unfreed_requests_and_frees_of_earlier_blocks_are_distinguished():
    recording = Recording()
    kept = recording.malloc(10)
    gone = recording.malloc(20, thread=1)
    recording.free(-1, 7)
    recording.free(gone, thread=1)
    trace = recording.trace()
    table = requests(trace.events, trace.layers)
    assert still_live(table).tolist() == [True, False]
    assert freed_elsewhere(table).tolist() == [False, False]
    assert earlier_frees(trace.events).tolist() == [2]
    request = rows.request(trace, kept)
    assert request.still_live and not request.freed_elsewhere
    assert (request.free_event, request.free_operator, request.free_phase, request.free_layer) == (-1, -1, None, None)


@given(recordings())
def test_request_table_matches_a_loop_over_the_events(recording):
    trace = recording.trace()
    expected = {}
    for index, event in enumerate(trace.events):
        if event["kind"] == EventKind.MALLOC:
            layer = event["layer"]
            expected[int(event["request"])] = {
                **dict.fromkeys(REQUEST.names, -1),
                **{name: event[name] for name in ("nbytes", "stream")},
                **{f"malloc_{name}": event[name] for name in ("operator", "phase", "layer", "thread")},
                "number": event["request"],
                "malloc_event": index,
                "dynamic": bool(layer >= 0 and trace.layers[layer].dynamic),
            }
        elif event["request"] >= 0:
            row = expected[int(event["request"])]
            row |= {f"free_{name}": event[name] for name in ("operator", "phase", "layer", "thread")}
            row["free_event"] = index
    assert trace.requests.tolist() == [tuple(expected[i][name] for name in REQUEST.names) for i in range(len(expected))]
    every = list(rows.requests(trace))
    assert [row.still_live for row in every] == still_live(trace.requests).tolist()
    assert [row.freed_elsewhere for row in every] == freed_elsewhere(trace.requests).tolist()


@given(recordings(), st.integers(0, 2**40))
def test_live_bytes_and_peak_match_a_replay(recording, base):
    trace = recording.trace(base_bytes=base)
    live, replayed, sizes = base, [], {}
    for event in trace.events.tolist():
        kind, request, nbytes = event[:3]
        if kind == EventKind.MALLOC:
            sizes[request] = nbytes
        live += nbytes if kind == EventKind.MALLOC else -(sizes[request] if request >= 0 else nbytes)
        replayed.append(live)
    assert live_bytes(trace.events, trace.base_bytes).tolist() == replayed
    event, nbytes = trace.replayed_peak()
    assert nbytes == max([base, *replayed])
    assert event == ([base, *replayed].index(nbytes) - 1)


def test_replay_is_exact_if_it_reaches_the_allocators_peak():
    recording = Recording()
    recording.free(recording.malloc(30))
    recording.malloc(20)
    assert recording.trace(base_bytes=5, peak_bytes=35).replays_exactly() is True
    assert recording.trace(base_bytes=5, peak_bytes=36).replays_exactly() is False
    assert recording.trace(base_bytes=5).replays_exactly() is None


def test_operator_has_its_place_and_its_reads_and_writes():
    recording = Recording()
    first, second = recording.tensor(), recording.tensor()
    recording.op("aten::zeros", writes=(first,))
    recording.phase(Pass.BACKWARD, 0)
    recording.layer("norm")
    recording.op("aten::mul", reads=(second, first), writes=(second,))
    trace = recording.trace()
    operator = rows.operator(trace, 1)
    assert (operator.index, operator.name, operator.time_ns) == (1, "aten::mul", 1000)
    assert (operator.phase, operator.layer) == (Phase(Pass.BACKWARD, 0), Layer("norm"))
    assert (operator.reads, operator.writes) == ((second, first), (second,))
    assert [each.name for each in rows.operators(trace)] == ["aten::zeros", "aten::mul"]
    assert rows.operator(trace, 0).layer is None
    assert rows.operator(trace, -1) == operator
    for wrong in (2, -3):
        with pytest.raises(IndexError):
            rows.operator(trace, wrong)
    with pytest.raises(IndexError):
        rows.request(trace, 0)


def test_step_extends_to_the_next_step_or_the_end_of_the_trace():
    trace = training(steps=3, micro_batches=1).trace()
    operators, events = len(trace.operators) // 3, len(trace.events) // 3
    for step in range(3):
        assert trace.step_operators(step) == slice(operators * step, operators * (step + 1))
        assert trace.step_events(step) == slice(events * step, events * (step + 1))
    with pytest.raises(IndexError):
        trace.step_operators(3)


def test_arrays_of_a_trace_are_read_only_copies_of_the_callers_arrays():
    recording = training()
    fields = recording.fields()
    trace = Trace(**fields)
    for array in (trace.operators, trace.uses, trace.tensors, trace.events, trace.requests, trace.live_bytes):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = array[1]
    fields["events"]["nbytes"] = 99
    assert rows.request(trace, 0).nbytes == 16
    with pytest.raises(FrozenInstanceError):
        trace.base_bytes = 1


def test_step_cut_out_equals_a_recording_of_that_step_alone():
    alone = training(steps=1).trace()
    second = cut(training(steps=3).trace(), 1)
    for name in ("names", "dtypes", "phases", "layers", "steps", "base_bytes"):
        assert getattr(second, name) == getattr(alone, name), name
    for name in ("uses", "tensors", "requests", "live_bytes"):
        assert getattr(second, name).tolist() == getattr(alone, name).tolist(), name
    assert second.operators["name"].tolist() == alone.operators["name"].tolist()
    # An event before the step's first operator refers to the previous step's last operator, which the cut removes.
    assert second.events.tolist() == alone.events.tolist()


def test_earlier_request_freed_in_a_cut_step_counts_in_its_base_bytes():
    recording = Recording()
    recording.step()
    early, stays = recording.malloc(100), recording.malloc(1)
    recording.step()
    late = recording.malloc(10)
    recording.free(early)
    recording.free(late)
    second = cut(recording.trace(base_bytes=1000), 1)
    assert second.base_bytes == 1101
    assert second.live_bytes.tolist() == [1111, 1011, 1001]
    assert earlier_frees(second.events).tolist() == [1]
    assert len(second.requests) == 1 and stays == 1


def test_event_of_a_cut_step_belongs_to_its_nearest_operator_in_the_step():
    fields = training(steps=3, micro_batches=1).fields()
    fields["events"]["operator"][8:16] = [-1, 0, 9, 10, 19, 20, 21, 29]
    assert cut(Trace(**fields), 1).events["operator"].tolist() == [-1, -1, -1, 0, 9, 9, 9, 9]


@given(recordings())
def test_step_cut_out_of_a_trace_keeps_its_live_bytes(recording):
    # More bytes than the recording frees, so live bytes stay above 0.
    trace = recording.trace(base_bytes=2**46)
    for step in range(len(trace.steps)):
        assert cut(trace, step).live_bytes.tolist() == trace.live_bytes[trace.step_events(step)].tolist()


def put(array, row, column, value):
    def change(fields):
        fields[array][column][row] = value

    return change


def freed_first(fields):
    fields["events"] = fields["events"][[4, 0, 1, 2, 3, *range(5, 16)]]


CANNOT_BE = {
    "operators[2].name is 4, outside of [0, 4)": put("operators", 2, "name", 4),
    "operators[0].name is -1, outside of [0, 4)": put("operators", 0, "name", -1),
    "operators[1].phase is 99, outside of [0, 6)": put("operators", 1, "phase", 99),
    "operators[1].layer is -2, outside of [-1, 2)": put("operators", 1, "layer", -2),
    "operators[3].time_ns is -5, below 0": put("operators", 3, "time_ns", -5),
    "operators[3].in_use_bytes is -1, below 0": put("operators", 3, "in_use_bytes", -1),
    "uses[0].tensor is 10, outside of [0, 10)": put("uses", 0, "tensor", 10),
    "uses[37].operator is 18, outside of [0, 18)": put("uses", 37, "operator", 18),
    "uses[1].operator is lower than the one before": put("uses", 0, "operator", 5),
    "tensors[1].dtype is 2, outside of [0, 2)": put("tensors", 1, "dtype", 2),
    "tensors[1].nbytes is -3, below 0": put("tensors", 1, "nbytes", -3),
    "events[4].kind is 2, outside of [0, 2)": put("events", 4, "kind", 2),
    "events[3].request is 99, outside of [-1, 8)": put("events", 3, "request", 99),
    "events[0].operator is 18, outside of [-1, 18)": put("events", 0, "operator", 18),
    "events[0].phase is -1, outside of [0, 6)": put("events", 0, "phase", -1),
    "events[0].layer is 2, outside of [-1, 2)": put("events", 0, "layer", 2),
    "events[0].nbytes is -1, below 0": put("events", 0, "nbytes", -1),
    "events[0].stream is -1, below 0": put("events", 0, "stream", -1),
    "events[0].thread is -1, below 0": put("events", 0, "thread", -1),
    "more bytes than fit an int64": put("events", 0, "nbytes", 2**63 - 1),
    "events[1] is the malloc of request 2, where number 1 is due": put("events", 1, "request", 2),
    "request 1 is freed more than once": put("events", 4, "request", 1),
    "events[0] frees request 2 before it is made": freed_first,
    "events[3] is a free of a request of this recording and has a size": put("events", 3, "nbytes", 16),
    "steps[0] begins at (19, 0)": lambda fields: fields.update(steps=((19, 0, 1.0),)),
    "steps[0] begins at (0, -1)": lambda fields: fields.update(steps=((0, -1, 1.0),)),
    "steps[1] begins at (3, 5)": lambda fields: fields.update(steps=((4, 5, 1.0), (3, 5, 1.0))),
    "steps[0] took nan s": lambda fields: fields.update(steps=((0, 0, float("nan")),)),
    "steps[0] took -1.0 s": lambda fields: fields.update(steps=((0, 0, -1.0),)),
    "steps[0] is (0, 0), not": lambda fields: fields.update(steps=((0, 0),)),
    "`steps` is not a tuple": lambda fields: fields.update(steps=[(0, 0, 1.0)]),
    "`operators` is not an array": lambda fields: fields.update(operators=fields["events"]),
    "`events` is not an array": lambda fields: fields.update(events=fields["events"].reshape(4, 4)),
    "`uses` is not an array": lambda fields: fields.update(uses=[]),
    "`names` is not a tuple of str": lambda fields: fields.update(names=(1, 2, 3, 4)),
    "`dtypes` is not a tuple of str": lambda fields: fields.update(dtypes=(np.dtype("f4"), np.dtype("f8"))),
    "`names` holds a name twice": lambda fields: fields.update(names=("aten::mm",) * 4),
    "`phases` is not a tuple of Phase": lambda fields: fields.update(phases=(Pass.FORWARD,) * 6),
    "`fingerprint` is not a Fingerprint": lambda fields: fields.update(fingerprint={}),
    "`base_bytes` is -1": lambda fields: fields.update(base_bytes=-1),
    "`peak_bytes` is 1.5": lambda fields: fields.update(peak_bytes=1.5),
}


@pytest.mark.parametrize("problem", CANNOT_BE)
def test_error_for_an_impossible_recording_names_the_problem(problem):
    fields = training(steps=1).fields()
    Trace(**fields)
    CANNOT_BE[problem](fields)
    with pytest.raises(TraceError, match=re.escape(problem)) as refused:
        Trace(**fields)
    assert "What to do" in str(refused.value)


def test_fingerprint_digest_is_stable_and_depends_on_every_field():
    fingerprint = Fingerprint(model="Llama", parameters=7, inputs=("int64[4, 512]",), versions=(("torch", "2.11.0"),))
    code = f"from memplug.profile.trace import Fingerprint; print(({fingerprint!r}).digest())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout.strip() == fingerprint.digest()
    assert re.fullmatch("[0-9a-f]{12}", fingerprint.digest())
    changes = {"model": "x", "parameters": 8, "layers": "x", "inputs": (), "rank": 1, "world_size": 2, "device": "x"}
    changes |= {"versions": (("torch", "2.12.0"),), "layout": (("zero_stage", 1),), "block": "x"}
    assert changes.keys() == set(Fingerprint.__dataclass_fields__)
    digests = {replace(fingerprint, **{name: value}).digest() for name, value in changes.items()}
    assert len(digests | {fingerprint.digest()}) == len(changes) + 1


def test_reading_traces_needs_no_torch():
    code = (
        "import sys\n"
        "import memplug.profile.trace_file, memplug.profile.tensors, tests.support.logical_layers\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert result.stdout.strip() == "False"
