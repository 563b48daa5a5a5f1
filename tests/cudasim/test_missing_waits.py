"""Each wait between the arena's streams is needed: without it, the simulator finds a race.

Tests leave a wait out of a copy of the native core. tests/tokenwise/engine/test_races.py leaves out the executor's
waits. The recorder has none, since it records only the host's work.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.folders import ROOT

pytestmark = pytest.mark.gpu

# for each wait: its file, its line, and ways to train (arena_streams.py) that go wrong without it
WAITS = {
    "bytes that another stream of the plan uses at other times": (
        "arena.cpp",
        "      device_.wait(stream, event);\n",
        "side",
    ),
    "reusable bytes in use, and the stream that the plan has them for": (
        "pending_uses.cpp",
        "    pending_.push_back({begin, end, stream, device_.record(stream)});\n",
        "side",
    ),
    "a block that another stream has still to read": (
        "arena.cpp",
        "  pending_.order(begin, begin + size, stream);\n",
        "side",
    ),
    "checks: what was freed is filled, and a stream that has still to read it": (
        "pending_uses.cpp",
        "      device_.wait(stream, pending_.back().event);\n",
        "side checked",
    ),
    "memory that was reserved, its users before, and that it is filled": (
        "arena_plan.cpp",
        "  device_.synchronize(); // any stream may be the first to use it\n",
        "aside checked",
    ),
    "memory that goes back, and the streams of the plan": (
        "arena_plan.cpp",
        "        device_.wait(part->stream, event);\n",
        "aside",
    ),
    "memory that goes back, and a block that another stream has still to read": (
        "arena_plan.cpp",
        "    pending_.order_after_all(part->stream);\n",
        "side aside",
    ),
}


def run(folder: Path, *ways: str) -> int:
    """Train as `arena_streams` does, with the package in that folder; return the number of unordered accesses."""
    # Expandable segments: releasing cached memory does not wait for the whole device.
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ["PYTHONPATH"], str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.cudasim.arena_streams", *ways],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=400,
    )
    found = re.search(r"unordered (\d+)", done.stdout)
    assert found, done.stderr[-2000:]
    return int(found[1])


def test_every_access_is_ordered_if_no_wait_is_missing() -> None:
    assert run(ROOT, *{ways for _, _, ways in WAITS.values()}) == 0


@pytest.mark.long  # each builds the core
@pytest.mark.parametrize("wait", WAITS)
def test_missing_wait_of_the_arena_is_detected(wait: str, tmp_path: Path) -> None:
    name, text, ways = WAITS[wait]
    shutil.copytree(ROOT / "memplug", tmp_path / "memplug", ignore=shutil.ignore_patterns("__pycache__"))
    (source,) = (tmp_path / "memplug").rglob(name)
    assert source.read_text().count(text) == 1
    source.write_text(source.read_text().replace(text, ""))
    assert run(tmp_path, ways) > 0
