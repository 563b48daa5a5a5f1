"""A layout planner is one file and one entry in a list: choices, help, schema and README follow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memplug import planners
from tests.support.folders import ROOT

TOY = '''
"""Side by side, whenever they live."""

import numpy as np

from memplug.arena.plan.problem import solved


def solve(problem, *, deadline_s=None, enough_bytes=None):
    table = problem.buffers
    unit = int(np.lcm.reduce(table["alignment"]))
    ends = np.cumsum(-(-table["size"] // unit) * unit)
    return solved(problem, np.concatenate(([0], ends[:-1])), "toy")
'''
ENTRY = '    Planner("toy", "side by side", "nothing", "memplug.arena.plan.toy"),\n'
STEPS = "id,lower,upper,size\na,0,2,5\nb,1,4,3\nc,3,6,5\n"


def memplug(folder: Path, *arguments: str) -> str:
    """Run a command of the copied package in `folder`, and return its output."""
    code = "import sys; from memplug.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a copy of the package with one more planner."""
    shutil.copytree(ROOT / "memplug", tmp_path / "memplug", ignore=shutil.ignore_patterns("__pycache__"))
    rooms = tmp_path / "memplug" / "arena" / "plan"
    (rooms / "toy.py").write_text(TOY)
    planner_list = tmp_path / "memplug" / "planners.py"
    text = planner_list.read_text()
    begin = text.index("PLANNERS: tuple")
    end = text.index("\n)\n", begin) + 1
    planner_list.write_text(text[:end] + ENTRY + text[end:])
    return tmp_path


def test_new_planner_needs_only_one_file_and_one_list_entry(folder: Path) -> None:
    (folder / "step.csv").write_text(STEPS)
    made = json.loads(memplug(folder, "plan", "step.csv", "--planner", "toy", "--json"))
    assert made["planner"] == "toy" and made["height_bytes"] == 13
    assert "toy" in memplug(folder, "plan", "--help")
    schema = json.loads(memplug(folder, "check", "--schema"))
    text = json.dumps(schema)
    assert '"toy"]' in text and "toy" in json.dumps(schema["$defs"]["ArenaConfig"]["properties"]["planner"])
    (folder / "ds.json").write_text(json.dumps({"memplug": {"enabled": True, "arena": {"planner": "toy"}}}))
    assert "planner toy" in memplug(folder, "check", "ds.json")


def test_arena_readme_quotes_the_planner_list() -> None:
    readme = (ROOT / "memplug/arena/README.md").read_text()
    rows = [f"| `{planner.name}` | {planner.does} | {planner.suits} |" for planner in planners.PLANNERS]
    assert "\n".join(["|---|---|---|", *rows, "| `auto` | `search` and `exact`"]) in readme
