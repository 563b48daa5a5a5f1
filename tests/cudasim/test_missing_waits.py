"""Each wait of the arena's streams, left out of a copy of the core, is noticed. Those of the executor are left out in
tests/test_races.py. The recorder has none: it notes what the host does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT

pytestmark = pytest.mark.gpu

# (bytes that two streams of a plan share: tests/native/arena_test.cpp)
# what is left out, in which file; whose memory the arena's is ("default": the stream that trains), how many streams run
WAITS = {
    "a block that another stream has still to read": (
        "arena.cpp",
        "      device_.wait(stream, pending.event);\n",
        ("default", 2),
    ),
    "memory that was reserved, and its users before": (
        "arena_plan.cpp",
        "  if (!made.empty()) { // any stream may be the first to use it\n    device_.synchronize();\n  }\n",
        ("other", 1),
    ),
    "memory that goes back, and the streams of the plan": (
        "arena_plan.cpp",
        "        device_.wait(part->stream, event);\n",
        ("other", 1),
    ),
    "memory that goes back, and a block that another stream has still to read": (
        "arena_plan.cpp",
        "      device_.wait(part->stream, pending.event);\n",
        ("other", 2),
    ),
}


def run(folder: Path, reserve: str, streams: int) -> int:
    """How many accesses were not ordered, with the package in that folder."""
    # memory that is mapped as it is needed: giving back what is cached does not wait for the whole device
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ["PYTHONPATH"], str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.cudasim.arena_streams", reserve, str(streams)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=400,
    )
    found = re.search(r"unordered (\d+)", done.stdout)
    assert found, done.stderr[-2000:]
    return int(found[1])


@pytest.mark.parametrize("how", sorted({how for _, _, how in WAITS.values()}), ids=str)
def test_nothing_is_unordered_with_all_of_them(how: tuple[str, int]) -> None:
    assert run(ROOT, *how) == 0


@pytest.mark.long  # each builds the core
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_of_the_arena_that_is_left_out_is_noticed(wait: str, tmp_path: Path) -> None:
    name, text, how = WAITS[wait]
    shutil.copytree(ROOT / "memplug", tmp_path / "memplug", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "memplug/native" / name
    assert source.read_text().count(text) == 1
    source.write_text(source.read_text().replace(text, ""))
    assert run(tmp_path, *how) > 0
