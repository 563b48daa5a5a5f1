"""`memplug plan` and `memplug show` of memory snapshots of torch's allocator."""

from __future__ import annotations

import json
import pickle
import time

import pytest
import torch
from typer.testing import CliRunner

from memplug.cli import app
from memplug.plan.layout.from_trace import problem_of_all
from memplug.profile.allocator_history import load
from memplug.show.snapshot import write_snapshot
from tests.support.allocator_snapshots import MIB, event, freed, segment, snapshot, steps
from tests.support.show_traces import training_trace

run = CliRunner().invoke
START = 0x7F00_0000_0000


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "oom.pickle"
    path.write_bytes(pickle.dumps(steps()))
    return path


def test_show_says_what_was_in_use_and_what_torch_reserved(path):
    result = run(app, ["show", str(path)])
    assert result.exit_code == 0, result.output
    for words in (
        "3 for",
        "on 2 streams",
        "model.py:12 forward",
        "before the recording",
        "20.00 MiB at most",
        "1 request",
    ):
        assert words in result.stdout
    facts = json.loads(run(app, ["show", str(path), "--json"]).stdout)
    assert facts["torch_reserved_bytes"] == 20 * MIB and facts["torch_out_of_memory"] == 1
    assert facts["peak_bytes"] == 4 * MIB + 6000 and facts["missing_events"] == 0
    assert facts["peak_bytes_by_code"] == {"model.py:12 forward": 3 * MIB + 1000, "before the recording": MIB + 5000}


def test_show_draws_a_snapshot_and_writes_it_for_memory_viz(path, tmp_path):
    pytest.importorskip("matplotlib")
    files = {view: tmp_path / f"out.{view}" for view in ("png", "snapshot")}
    result = run(app, ["show", str(path), *(word for view, to in files.items() for word in (f"--{view}", str(to)))])
    assert result.exit_code == 0 and all(file.stat().st_size for file in files.values())
    again = load(files["snapshot"])
    assert again.trace.live_bytes.tolist() == load(path).trace.live_bytes.tolist() and again.reserved_bytes is None
    refused = run(app, ["show", str(path), "--chrome", str(tmp_path / "x.json")])
    assert refused.exit_code == 1 and "only requests for memory" in refused.stderr


def test_plan_says_what_an_arena_would_have_taken_beside_what_torch_reserved(path, tmp_path):
    result = run(app, ["plan", str(path), "-o", str(tmp_path / "plan.json"), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    # Both streams have memory of their own; the third request takes the place of the freed block from before.
    assert facts["height_bytes"] == facts["lower_bound_bytes"] == 4 * MIB + 1024 + 5120
    assert facts["torch_reserved_bytes"] == 20 * MIB
    assert facts["torch_fragmentation"] == pytest.approx(1 - facts["lower_bound_bytes"] / (20 * MIB))
    words = run(app, ["plan", str(path)]).stdout
    assert "torch reserved" in words and "15.99 MiB more than this arena" in words
    assert run(app, ["show", str(tmp_path / "plan.json")]).exit_code == 0


def test_fragmentation_of_torch_is_none_of_the_arenas(tmp_path):
    """Blocks of 3 and of 2 MiB by turns, the former freed, leave no room for one of 4 in what torch has."""
    blocks = {START + 5 * MIB * number: 3 * MIB for number in range(8)}
    small = {at + 3 * MIB: 2 * MIB for at in blocks}
    events = [event("segment_alloc", START, 40 * MIB)]
    events += [event("alloc", at, size) for at, size in sorted({**blocks, **small}.items())]
    events += [each for at, size in blocks.items() for each in freed(at, size)]
    big = START + 100 * MIB
    for number in range(6):
        events += [event("segment_alloc", big + 4 * MIB * number, 4 * MIB)]
        events += [event("alloc", big + 4 * MIB * number, 4 * MIB)]
    segments = [segment(START, 40 * MIB, small)]
    segments += [segment(big + 4 * MIB * number, 4 * MIB, {big + 4 * MIB * number: 4 * MIB}) for number in range(6)]
    path = tmp_path / "fragmented.pickle"
    path.write_bytes(pickle.dumps(snapshot(events, segments)))
    facts = json.loads(run(app, ["plan", str(path), "--json"]).stdout)
    assert facts["torch_reserved_bytes"] == 64 * MIB and facts["height_bytes"] == 40 * MIB
    assert facts["torch_fragmentation"] == pytest.approx(1 - 40 / 64) and facts["fragmentation"] == 0


def test_no_two_blocks_of_a_plan_overlap_in_time_and_all_are_placed(path):
    history = load(path)
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


def test_a_snapshot_of_memplug_has_no_reserved_memory_of_torch(tmp_path):
    path = tmp_path / "step.pickle"
    write_snapshot(training_trace(), path)
    for command in ("show", "plan"):
        facts = json.loads(run(app, [command, str(path), "--json"]).stdout)
        assert facts["torch_reserved_bytes"] is None
        assert "or memplug wrote it" in run(app, [command, str(path)]).stdout


def test_options_that_a_snapshot_does_not_have_are_usage_errors(path, tmp_path):
    for command in ("show", "plan"):
        assert run(app, [command, str(path), "--step", "0"]).exit_code == 2
        refused = run(app, [command, str(path), "--device", "3"])
        assert refused.exit_code == 1 and "no events of device 3" in refused.stderr


def test_nothing_in_a_snapshot_is_run(tmp_path):
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [[time.sleep]]}))
    for command in ("show", "plan"):
        refused = run(app, [command, str(path)])
        assert (
            refused.exit_code == 1 and "asks to import or to call" in refused.stderr and "What to do" in refused.stderr
        )


@pytest.mark.gpu
def test_a_history_that_torch_recorded_has_what_its_counters_have(tmp_path):
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
    assert run(app, ["plan", str(path)]).exit_code == run(app, ["show", str(path)]).exit_code == 0
