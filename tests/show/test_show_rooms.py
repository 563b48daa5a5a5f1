"""If the room of a technique is missing, the other techniques show plans, traces and blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memplug.block import TECHNIQUES
from memplug.plans.plan_file import save as save_plan
from memplug.profile.trace_file import save as save_trace
from memplug.swap.plan.part import SwapPart
from tests.support.memory_plans import decided_plan, target
from tests.support.rooms import copy_without
from tests.support.show_traces import training_trace

SHOW = """
import json, sys, memplug
from typer.testing import CliRunner
from memplug.cli import app

def run(*arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    return result.stdout

facts = json.loads(run("show", "plan.json", "--json", "--html", "plan.html"))
words = [run("show", "plan.json"), run("diff", "plan.json", "plan.json"), run("check", "ds.json")]
run("show", "trace.npz", "--html", "trace.html")
planned = CliRunner().invoke(app, ["plan", "trace.npz"])
if sys.argv[1] == "arena":
    assert planned.exit_code == 1 and "memplug/arena is missing" in planned.output, planned.output
else:
    assert planned.exit_code == 0, (planned.output, planned.exception)
from memplug.show.techniques import in_place
libraries = [key for each in in_place() for key in each.libraries()]
modules = [name for name in sys.modules if name == "torch" or name.startswith(f"memplug.{sys.argv[1]}")]
found = {"memplug": memplug.__file__, "facts": facts, "words": words, "modules": modules, "libraries": libraries}
print(json.dumps(found))
"""
LIBRARIES = {"address_search": "arena", "planner_rules": "tokenwise"}
KEYS = {"tokenwise": "decisions", "swap": "swap_list", "arena": "height_bytes"}


@pytest.mark.parametrize("gone", TECHNIQUES)
@pytest.mark.parametrize("left", ["native", ""], ids=["C++ left", "nothing left"])
def test_plans_and_traces_are_shown_without_the_room_of_a_technique(gone: str, left: str, tmp_path: Path) -> None:
    environment = copy_without(gone, left, tmp_path)
    save_plan(decided_plan().with_part(SwapPart(targets=(target("aten::mm", 3),))), tmp_path / "plan.json")
    save_trace(training_trace(), tmp_path / "trace.npz")
    (tmp_path / "ds.json").write_text(json.dumps({"memplug": {"enabled": True, gone: {"enabled": False}}}))
    command = [sys.executable, "-c", SHOW, gone]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["memplug"]).is_relative_to(tmp_path) and not found["modules"]
    assert {name for name, key in KEYS.items() if key in found["facts"]} == {*KEYS} - {gone}
    assert set(found["libraries"]) == {key for key, technique in LIBRARIES.items() if technique != gone}
    assert all(found["words"]) and "memplug is on." in found["words"][-1]
    assert "newPlot" in (tmp_path / "plan.html").read_text() and "newPlot" in (tmp_path / "trace.html").read_text()
