"""A technique is a room: without it the others train, and a block that enables it is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memplug.block import TECHNIQUES
from memplug.plans.plan_file import save as save_plan
from memplug.profile.trace_file import save as save_trace
from memplug.swap.plan.part import SwapPart
from tests.support.folders import ROOT
from tests.support.memory_plans import decided_plan, target
from tests.support.show_traces import training_trace

SCRIPT = """
import json, sys, torch, memplug
from memplug.errors import ConfigError
from tests.support.blocks import Stack

def train(block):
    torch.manual_seed(0)
    model, losses = Stack(2), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with memplug.attach(model, block) as session:
        for _ in range(12):
            loss = model(torch.randn(2, 6, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            losses.append(loss.item())
        return losses, session.report().as_dict()

block, gone = json.loads(sys.argv[1]), sys.argv[2]
losses, report = train(block)
refused = ""
try:
    train({**block, gone: {"enabled": True}})
except ConfigError as error:
    refused = str(error)
found = {
    "memplug": memplug.__file__, "modules": [name for name in sys.modules if name.startswith(f"memplug.{gone}")],
    "losses": [losses, train({})[0]], "report": report, "refused": refused,
}
print(json.dumps(found))
"""
BLOCK = {
    "enabled": True,
    "plan_dir": False,
    "device_budget_gib": 1,
    "tokenwise": {"regions": ["layers.*"], "min_offload_bytes": 1},
    "profiler": {"warmup_steps": 0, "policy_steps": 1, "wait_for_plans": True},
}


@pytest.fixture(params=["native", pytest.param("", marks=pytest.mark.long)], ids=["but its C++", "at all"])
def left(request: pytest.FixtureRequest) -> str:
    """The folder that is left of a room. Without its C++ the core is built anew, which takes minutes."""
    return request.param


def copy_without(name: str, left: str, folder: Path) -> dict[str, str]:
    """Copies the package without a technique's room; returns the environment in which Python finds the copy."""
    shutil.copytree(ROOT / "memplug", folder / "memplug", ignore=shutil.ignore_patterns("__pycache__"))
    for entry in (folder / "memplug" / name).iterdir():
        if entry.name != left:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if not left:
        (folder / "memplug" / name).rmdir()
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def trained_without(name: str, left: str, folder: Path, block: dict[str, Any]) -> dict[str, Any]:
    """What training finds in a copy of the package without a technique's room."""
    environment = copy_without(name, left, folder)
    command = [sys.executable, "-c", SCRIPT, json.dumps(block), name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["memplug"]).is_relative_to(folder) and not found["modules"]
    return found


def test_without_the_arena_the_others_train(left: str, tmp_path: Path) -> None:
    found = trained_without("arena", left, tmp_path, {**BLOCK, "arena": {"enabled": False}, "swap": {"enabled": True}})
    assert found["losses"][0] == found["losses"][1]
    assert found["report"]["swap"] == "fits" and found["report"]["replans"] == 1
    assert "memplug.arena.enabled: got true; allowed: false" in found["refused"]


def test_without_the_swap_list_the_others_train(left: str, tmp_path: Path) -> None:
    found = trained_without("swap", left, tmp_path, {**BLOCK, "swap": {"enabled": False}})
    assert found["losses"][0] == found["losses"][1]
    assert found["report"]["arena"] == "serving" and found["report"]["replans"] == 1
    assert "memplug.swap.enabled: got true; allowed: false" in found["refused"]


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
    assert planned.exit_code == 1 and "memplug/arena is not there" in planned.output, planned.output
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
@pytest.mark.parametrize("left", ["native", ""], ids=["but its C++", "at all"])
def test_without_a_technique_plans_and_traces_are_shown_by_the_others(gone: str, left: str, tmp_path: Path) -> None:
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
