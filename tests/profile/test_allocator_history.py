"""Snapshots of torch's allocator give its requests, earlier and final blocks, and reserved memory."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from memplug.arena.plan.from_trace import problem_of_all
from memplug.cli import app
from memplug.errors import TraceError
from memplug.profile.allocator_history import History, is_snapshot, load
from memplug.profile.trace import EventKind
from memplug.show.snapshot import snapshot as snapshot_of
from tests.support.allocator_snapshots import MIB, event, freed, segment, snapshot, steps
from tests.support.show_traces import training_trace
from tests.support.traces import recordings

START = 0x7F00_0000_0000


@pytest.fixture
def history_of(tmp_path):
    def read(content, device: int | None = None) -> History:
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
        assert is_snapshot(path)
        return load(path, device)

    return read


def rows(history: History) -> list[tuple]:
    """Return kind, request, bytes and stream of each event."""
    return [tuple(row)[:4] for row in history.trace.events.tolist()]


MALLOC, FREE = int(EventKind.MALLOC), int(EventKind.FREE)


def test_requests_have_sizes_lifetimes_and_streams(history_of):
    history = history_of(steps())
    assert rows(history) == [
        (MALLOC, 0, 1000, 0),
        (MALLOC, 1, 3 * MIB, 1),
        (FREE, -1, MIB, 0),
        (MALLOC, 2, 700_000, 0),
        (FREE, 1, 0, 1),  # freed only now, since its stream was still using it
        (FREE, 0, 0, 0),
    ]
    assert history.trace.base_bytes == MIB + 5000 and history.missing == 0 and history.out_of_memory == 1
    assert history.trace.replayed_peak()[1] == MIB + 5000 + 1000 + 3 * MIB
    assert int(history.trace.live_bytes[-1]) == 700_000 + 5000
    assert history.reserved_bytes == 20 * MIB
    assert [layer.name for layer in history.trace.layers] == ["model.py:12 forward"]


def test_ring_buffer_without_its_beginning_gives_the_same_live_bytes(history_of):
    whole, cut = history_of(steps()), history_of(steps(truncated=True))
    assert cut.trace.base_bytes == 5000 + 1000 + 3 * MIB  # the block that was freed before the cut is unknown
    length = len(cut.trace.events)
    assert cut.trace.live_bytes.tolist() == whole.trace.live_bytes[-length:].tolist()
    assert cut.missing == 0 and cut.reserved_bytes == 20 * MIB


def test_reserved_bytes_count_expandable_and_earlier_segments(history_of):
    events = [
        event("segment_unmap", START + 8 * MIB, 6 * MIB),
        event("segment_map", START, 2 * MIB),
        event("alloc", START, MIB),
        event("segment_free", START + 100 * MIB, 20 * MIB),
    ]
    history = history_of(snapshot(events, [segment(START, 4 * MIB, {START: MIB})]))
    assert history.reserved_bytes == 4 * MIB + 20 * MIB + max(0, 6 * MIB - 2 * MIB)


def test_busiest_device_is_read_unless_the_caller_names_another(history_of):
    few, many = [event("alloc", START, 1)], [event("alloc", START, 2), *freed(START, 2)]
    made = {"segments": [segment(START, MIB, {START: 1}, device=1)], "device_traces": [[], few, [], many]}
    assert (history_of(made).device, history_of(made).devices) == (3, (1, 3))
    history = history_of(made, device=1)
    assert rows(history) == [(MALLOC, 0, 1, 0)] and history.reserved_bytes == MIB
    with pytest.raises(TraceError, match="no events of device 2\n.*(1, 3)"):
        history_of(made, device=2)


def test_missing_events_are_counted_and_blocks_never_overlap(history_of):
    events = [
        event("alloc", START, 4096),
        event("alloc", START + 1024, 512),  # the first block's free is missing
        *freed(START, 4096),  # its malloc is missing
        event("alloc", START + 8192, 512),
        event("segment_free", START + 8192, 8192),  # with a block inside
        event("alloc", START + 2048, 512),  # not in use at the end: its free is missing
    ]
    history = history_of(snapshot(events, [segment(START, MIB, {START + 1024: 512, START: 512})]))
    assert history.missing == 5 and history.trace.base_bytes == 0
    live = history.trace.live_bytes.tolist()
    assert live[:2] == [4096, 0] and live[-1] == 512


def test_lifetimes_end_at_the_free_request_if_completion_is_missing(history_of):
    events = [event("alloc", START, 10), event("free_requested", START, 10), event("alloc", START, 20)]
    history = history_of(snapshot(events, []))
    assert rows(history) == [(MALLOC, 0, 10, 0), (FREE, 0, 0, 0), (MALLOC, 1, 20, 0)] and history.missing == 0
    assert history.reserved_bytes is None


def test_block_waiting_for_another_stream_counts_as_in_use(history_of):
    made = snapshot([event("alloc", START, 10), event("free_requested", START, 10), *freed(START + 512, 5)], [])
    made["segments"] = [segment(START, MIB, {START: 10})]
    made["segments"][0]["blocks"][0]["state"] = "active_pending_free"
    history = history_of(made)
    assert int(history.trace.live_bytes[-1]) == 10 and history.missing == 0


def test_missing_block_addresses_are_computed_from_their_segment(history_of):
    made = steps()
    for block in made["segments"][0]["blocks"]:
        del block["address"]
    assert rows(history_of(made)) == rows(history_of(steps()))
    assert history_of(made).trace.base_bytes == history_of(steps()).trace.base_bytes


@pytest.mark.parametrize("trace", [training_trace(), training_trace(steps=1)], ids=["many", "one"])
def test_snapshot_written_by_memplug_reads_back(history_of, trace):
    history = history_of(snapshot_of(trace))
    assert history.trace.live_bytes.tolist() == trace.live_bytes.tolist()
    assert history.trace.requests["nbytes"].tolist() == trace.requests["nbytes"].tolist()
    assert history.reserved_bytes is None and history.missing == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "no `device_traces`"),
        ({"segments": []}, "no `device_traces`"),
        ({"segments": [], "device_traces": [[], []]}, "no history, only"),
        (snapshot([{"action": "alloc", "size": 1}], []), "damaged: KeyError"),
        (snapshot([event("alloc", -1, 1)], []), "no address or size"),
        (snapshot([event("alloc", 1, 1 << 60)], []), "no address or size"),
        (snapshot([event("alloc", 1, True)], []), "no address or size"),
        (snapshot([event("alloc", 1, "x" * 10_000)], []), "no address or size"),
        (snapshot([event("alloc", 1, 1, stream=[])], []), "damaged: TypeError"),
        (snapshot([[]], []), "damaged: TypeError"),
        (snapshot([event("alloc", 1, 1)], [{"address": 1}]), "damaged: KeyError"),
        (pickle.dumps(print), "not a snapshot of torch's allocator: it asks"),
        (pickle.dumps(steps())[:-500], "damaged: ValueError: damaged or cut short at byte"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_invalid_snapshot_raises_trace_error_with_advice(history_of, content, said):
    with pytest.raises(TraceError, match="What to do") as caught:
        history_of(content)
    assert said in str(caught.value) and len(str(caught.value)) < 500


def test_segments_that_share_blocks_are_refused(history_of):
    blocks = [{"size": 512, "state": "inactive"}] * 20_000
    shared = [{"device": 0, "address": 0, "total_size": 1, "blocks": blocks}] * 20_000
    with pytest.raises(TraceError, match="more blocks than bytes"):
        history_of(snapshot([event("alloc", 1, 1)], shared))


def test_damaged_values_are_read_or_raise_trace_error(history_of):
    content, chance = pickle.dumps(steps()), random.Random(1)
    for _ in range(600):
        damaged = bytearray(content)
        damaged[chance.randrange(2, len(damaged))] = chance.randrange(256)
        try:
            history_of(bytes(damaged))
        except TraceError as error:
            assert error.advice


@given(recordings(), st.integers(0, 30))
def test_history_that_begins_later_ends_with_the_same_live_bytes(tmp_path_factory, recording, lost):
    # a full ring buffer has lost the first events: earlier blocks show only in their frees, or at the end
    trace = recording.trace(base_bytes=2**30)
    if int(trace.events["nbytes"][trace.events["request"] < 0].sum()) > 2**30:
        return
    made = snapshot_of(trace)
    events = made["device_traces"][0]
    made["device_traces"][0] = events[min(lost, len(events) - 1) :]
    path = tmp_path_factory.mktemp("ring") / "snapshot.pickle"
    path.write_bytes(pickle.dumps(made))
    if not any(each["action"] in ("alloc", "free_completed") for each in made["device_traces"][0]):
        return
    found = load(path)
    live = found.trace.live_bytes.tolist()
    assert found.missing == 0 and live[-1] == trace.live_bytes.tolist()[-1]


def test_layout_problem_of_a_history_has_each_block_with_its_lifetime(history_of):
    history = history_of(steps())
    problem = problem_of_all(history.trace)
    assert problem.ids.tolist() == [0, 1, 2, -1, -2]
    assert [(row["lower"], row["upper"], row["stream"]) for row in problem.buffers] == [
        (1, 6, 0),
        (2, 5, 1),
        (4, 7, 0),
        (0, 3, 0),
        (0, 7, 0),
    ]
    assert problem.buffers["size"].tolist() == [1024, 3 * MIB, 700_416, MIB, 5120]


@pytest.mark.gpu
def test_history_recorded_by_torch_matches_its_counters(tmp_path):
    path = tmp_path / "snapshot.pickle"
    torch.cuda.empty_cache()
    before = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    try:
        base = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        side = torch.cuda.Stream()
        for size in (1000, 5 * MIB, 700_000):
            first = torch.empty(size, dtype=torch.uint8, device="cuda")
            with torch.cuda.stream(side):
                second = torch.empty(2 * size, dtype=torch.uint8, device="cuda")
            del first
        del before
        stats = torch.cuda.memory_stats()
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    history = load(path)
    assert history.trace.base_bytes == base and history.missing == 0
    assert history.trace.replayed_peak()[1] == stats["requested_bytes.all.peak"]
    assert int(history.trace.live_bytes[-1]) == stats["requested_bytes.all.current"] and second is not None
    assert history.reserved_bytes == stats["reserved_bytes.all.peak"]
    for command in ("plan", "show"):
        assert CliRunner().invoke(app, [command, str(path)]).exit_code == 0
