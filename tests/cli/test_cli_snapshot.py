"""`memplug plan` and `memplug show` on memory snapshots of torch's allocator."""

from __future__ import annotations

import json
import pickle
import time

import pytest
from typer.testing import CliRunner

from memplug.cli import app
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


def test_show_reports_memory_in_use_and_reserved_by_torch(path):
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


def test_show_draws_a_snapshot_and_writes_it_for_memory_viz(chrome, path, tmp_path):
    files = {view: tmp_path / f"out.{view}" for view in ("png", "snapshot")}
    result = run(app, ["show", str(path), *(word for view, to in files.items() for word in (f"--{view}", str(to)))])
    assert result.exit_code == 0 and all(file.stat().st_size for file in files.values())
    facts, again = (json.loads(run(app, ["show", str(each), "--json"]).stdout) for each in (path, files["snapshot"]))
    assert again["peak_bytes"] == facts["peak_bytes"] and again["torch_reserved_bytes"] is None
    refused = run(app, ["show", str(path), "--chrome", str(tmp_path / "x.json")])
    assert refused.exit_code == 1 and "only memory requests" in refused.stderr


def test_plan_compares_arena_size_with_torchs_reserved_memory(path, tmp_path):
    result = run(app, ["plan", str(path), "-o", str(tmp_path / "plan.json"), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    # Each stream has memory of its own; the third request reuses the memory of the block that was freed before it.
    assert facts["height_bytes"] == facts["lower_bound_bytes"] == 4 * MIB + 1024 + 5120
    assert facts["torch_reserved_bytes"] == 20 * MIB
    assert facts["torch_fragmentation"] == pytest.approx(1 - facts["lower_bound_bytes"] / (20 * MIB))
    words = run(app, ["plan", str(path)]).stdout
    assert "torch reserved" in words and "15.99 MiB more than this arena" in words
    assert run(app, ["show", str(tmp_path / "plan.json")]).exit_code == 0


def test_arena_avoids_torchs_fragmentation(tmp_path):
    """Freed blocks of 3 MiB between used ones of 2 MiB leave torch no room for a block of 4 MiB."""
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


def test_snapshot_by_memplug_has_no_reserved_memory_of_torch(tmp_path):
    path = tmp_path / "step.pickle"
    write_snapshot(training_trace(), path)
    for command in ("show", "plan"):
        facts = json.loads(run(app, [command, str(path), "--json"]).stdout)
        assert facts["torch_reserved_bytes"] is None
        assert "or memplug wrote it" in run(app, [command, str(path)]).stdout


def test_trace_options_are_refused_for_snapshots(path, tmp_path):
    for command in ("show", "plan"):
        assert run(app, [command, str(path), "--step", "0"]).exit_code == 2
        refused = run(app, [command, str(path), "--device", "3"])
        assert refused.exit_code == 1 and "no events of device 3" in refused.stderr


def test_code_in_a_snapshot_is_never_executed(tmp_path):
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [[time.sleep]]}))
    for command in ("show", "plan"):
        refused = run(app, [command, str(path)])
        assert (
            refused.exit_code == 1 and "asks to import or to call" in refused.stderr and "What to do" in refused.stderr
        )
