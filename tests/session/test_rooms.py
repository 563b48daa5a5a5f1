"""Training works without the room of any one technique; a block that enables that technique is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memplug.session.techniques import FOLLOWING
from tests.support.rooms import copy_without

SCRIPT = """
import json, sys, torch, memplug
from memplug.errors import ConfigError
from memplug.native import building
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

block, gone, further = json.loads(sys.argv[1]), *sys.argv[2:]
ordinary = building.flags()
building.flags = lambda: [*ordinary, *further.split()]
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

IN_FORCE = {"swap": "fits", "arena": "serving"}
"""The state that a technique reports once the program lasts."""


@pytest.fixture(params=["native", pytest.param("", marks=pytest.mark.long)], ids=["C++ stays", "nothing stays"])
def left(request: pytest.FixtureRequest) -> str:
    """Return the folder that stays when a room is removed; if none stays, the core is rebuilt, which takes minutes."""
    return request.param


def trained_without(name: str, left: str, folder: Path, block: dict[str, Any]) -> dict[str, Any]:
    """Return the results of training in a copy of the package without a technique's room."""
    environment = copy_without(name, left, folder)
    further = "" if left else "-O0"  # a rebuilt core takes a third of the time
    command = [sys.executable, "-c", SCRIPT, json.dumps(block), name, further]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["memplug"]).is_relative_to(folder) and not found["modules"]
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", [technique.name for technique in FOLLOWING])
def test_training_works_after_removal_of_one_techniques_room(name: str, left: str, tmp_path: Path) -> None:
    others = [technique.name for technique in FOLLOWING if technique.name != name]
    block = {name: {"enabled": False}, **{other: {"enabled": True} for other in others}}
    found = trained_without(name, left, tmp_path, {**BLOCK, **block})
    assert found["losses"][0] == found["losses"][1]
    states = {other: state for other, state in IN_FORCE.items() if other != name}
    assert {other: found["report"][other] for other in states} == states
    assert found["report"]["replans"] == 1
    assert f"memplug.{name}.enabled: got true; allowed: false" in found["refused"]
