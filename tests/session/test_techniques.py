"""A technique is one file and one entry: stages, recorder, plans on disk and detaching follow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import ROOT

TOY = '''
"""Sums the requests of a program."""

from dataclasses import dataclass

from memplug.plans.schema import PlanPart
from memplug.profile.recorder import Detail
from memplug.session.technique import Technique

CALLS = []


@dataclass(frozen=True)
class Sum(PlanPart):
    name = "toy"
    asked_bytes: int


class Toy(Technique[Sum]):
    name = "toy"
    part_type = Sum
    mistakes_of = staticmethod(lambda part: iter(()))
    least = 1

    def __init__(self):
        self.begun = False

    @property
    def detail(self):
        return Detail.REQUESTS if self.begun else None

    def propose(self, trace):
        if CALLS and CALLS[-1][0] == "install":
            return None
        self.begun, begun = True, self.begun
        if not begun or trace is None:
            return None
        asked = int(trace.requests["nbytes"].sum())
        CALLS.append(("propose", asked))
        return Sum(asked)

    def judge(self, part):
        return "" if part.asked_bytes >= self.least else f"only {part.asked_bytes} bytes"

    def install(self, part):
        self.begun = False
        CALLS.append(("install", part.asked_bytes))

    def withdraw(self):
        self.begun = False
        CALLS.append(("withdraw", 0))
'''
TRAIN = """
import json, sys
import torch
import memplug
from memplug import toy
from tests.support.serving import llama

def train(plan_dir):
    toy.CALLS.clear()
    torch.manual_seed(0)
    model, states, losses = llama(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    swapping = {"regions": ["model.layers.*"], "min_offload_bytes": 1}
    with memplug.attach(model, {"enabled": True, "plan_dir": plan_dir, "tokenwise": swapping}) as session:
        for step in range(24):
            length = 16 if step < 12 or step >= 22 else 24
            batch = torch.arange(2 * length).reshape(2, length) % 64
            loss = model(batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            losses.append(loss.item())
            states.append(session.report().arena.state)
        before = len(toy.CALLS)
    print(json.dumps({"calls": toy.CALLS, "attached": before, "states": states, "losses": losses}))

toy.Toy.least = int(sys.argv[2])
for _ in range(int(sys.argv[3])):
    train(sys.argv[1])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the package with one more technique, in front of the arena."""
    shutil.copytree(ROOT / "memplug", tmp_path / "memplug", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "memplug" / "toy.py").write_text(TOY)
    entries = tmp_path / "memplug" / "session" / "techniques.py"
    text = entries.read_text()
    assert text.count('\nif has_technique("arena"):') == 1
    toy = '\nfrom memplug.toy import Toy\n\nFOLLOWING += (Toy,)\n\nif has_technique("arena"):'
    entries.write_text(text.replace('\nif has_technique("arena"):', toy))
    return tmp_path


def trained(folder: Path, runs: int, least: int = 1) -> tuple[list[dict[str, Any]], str]:
    """Runs of the package in that folder, one after the other, which keep their plans there; and what they logged."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-c", TRAIN, str(folder / "plans"), str(least), str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-runs:]], done.stderr


@pytest.mark.long
def test_a_technique_is_one_file_and_one_entry(folder: Path) -> None:
    (first, second), _ = trained(folder, runs=2)
    calls = [tuple(call) for call in first["calls"][: first["attached"]]]
    verbs = [verb for verb, _ in calls]
    assert verbs == ["propose", "install", "withdraw", "propose", "install", "install"], "each program proposed once"
    assert calls[0][1] == calls[1][1] == calls[5][1] > 0, "the first program's part is in force again"
    assert first["calls"][-1] == ["withdraw", 0], "detached"
    assert first["states"][11] == first["states"][21] == "serving", "the arena follows it"

    kept = [json.loads(file.read_text()) for file in (folder / "plans").glob("*.json")]
    assert sorted(plan["parts"]["toy"]["asked_bytes"] for plan in kept) == sorted([calls[1][1], calls[4][1]])

    assert second["losses"] == first["losses"]
    assert [verb for verb, _ in second["calls"][: second["attached"]]] == ["install"] * 3, "nothing is proposed again"
    assert set(second["states"]) == {"serving"}


def test_a_part_that_the_judge_refuses_is_never_installed_and_training_goes_on(folder: Path) -> None:
    (run,), log = trained(folder, runs=1, least=10**15)
    assert [verb for verb, _ in run["calls"]] == ["propose", "withdraw", "withdraw"]
    assert "goes on without the toy: the judge refuses the plan" in log
    assert run["states"][11] == "serving", "the arena plans as if there were no such technique"
