"""A technique is a room, a section and an entry; stages, recordings, report, plan files and detaching work with it."""

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
from typing import ClassVar

from memplug.plans.schema import PlanPart
from memplug.profile.recorder import Detail
from memplug.session.technique import Technique
from memplug.session.technique_report import FollowerReport

CALLS = []


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyReport(FollowerReport):
    prefix: ClassVar[str] = "toy_"

    asked_bytes: int = 0


@dataclass(frozen=True)
class Sum(PlanPart):
    name = "toy"
    asked_bytes: int


class Toy(Technique[Sum]):
    name = "toy"
    part_type = Sum
    mistakes_of = staticmethod(lambda part: iter(()))
    report_type = ToyReport

    def __init__(self, least_bytes):
        self.begun, self.least_bytes, self.part = False, least_bytes, None

    @classmethod
    def make(cls, given):
        return cls(given.config.toy.least_bytes)

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
        return "" if part.asked_bytes >= self.least_bytes else f"only {part.asked_bytes} bytes"

    def install(self, part):
        self.begun, self.part = False, part
        CALLS.append(("install", part.asked_bytes))

    def withdraw(self):
        self.begun, self.part = False, None
        CALLS.append(("withdraw", 0))

    def report(self):
        state = "off" if self.off_because else "summing" if self.part else "waiting"
        asked_bytes = self.part.asked_bytes if self.part else 0
        return ToyReport(state=state, off_because=self.off_because or None, asked_bytes=asked_bytes)
'''
SECTION = '''
class ToyConfig(TechniqueSection):
    """Sums."""

    enabled: Switch = False
    """true or false. Sums the requests of a step."""
    least_bytes: Bytes = 1
    """A smaller sum is refused. A whole number, 0 or more, in bytes."""


class ReportConfig(Section):'''
FIELD = """    toy: Annotated[ToyConfig, Allowed("an object")] = ToyConfig()
    \"\"\"Sums. An object.\"\"\"
    report: Annotated["""
ENTRY = """
if has_technique("toy"):
    from memplug.toy.technique import Toy

    FOLLOWING += (Toy,)

if has_technique("arena"):"""
TRAIN = """
import json, sys
import torch
import memplug
from memplug.toy import technique as toy
from tests.support.serving import llama

def train(plan_dir, block):
    toy.CALLS.clear()
    torch.manual_seed(0)
    model, states, losses, reports = llama(), [], [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    swapping = {"regions": ["model.layers.*"], "min_offload_bytes": 1}
    with memplug.attach(model, {"enabled": True, "plan_dir": plan_dir, "tokenwise": swapping, **block}) as session:
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
            reports.append(session.report().as_dict()["toy"])
        before = len(toy.CALLS)
    print(json.dumps({"calls": toy.CALLS, "attached": before, "states": states, "losses": losses, "reports": reports}))

for _ in range(int(sys.argv[3])):
    train(sys.argv[1], json.loads(sys.argv[2]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the package with one more technique, in front of the arena."""
    shutil.copytree(ROOT / "memplug", tmp_path / "memplug", ignore=shutil.ignore_patterns("__pycache__"))
    room = tmp_path / "memplug" / "toy"
    room.mkdir()
    (room / "__init__.py").write_text("")
    (room / "technique.py").write_text(TOY)
    put(tmp_path / "memplug" / "block.py", "\nclass ReportConfig(Section):", SECTION)
    put(tmp_path / "memplug" / "block.py", "    report: Annotated[", FIELD)
    put(tmp_path / "memplug" / "session" / "techniques.py", '\nif has_technique("arena"):', ENTRY)
    return tmp_path


def put(file: Path, place: str, text: str) -> None:
    """Replace the string `place` of a file by `text`, which ends with that string."""
    before = file.read_text()
    assert before.count(place) == 1 and text.endswith(place)
    file.write_text(before.replace(place, text))


def trained(folder: Path, runs: int, **block: Any) -> tuple[list[dict[str, Any]], str]:
    """Train `runs` times with the package in `folder`, and keep plans there; return the results and the log."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-c", TRAIN, str(folder / "plans"), json.dumps(block), str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-runs:]], done.stderr


@pytest.mark.long
def test_new_technique_needs_only_a_room_a_section_and_an_entry(folder: Path) -> None:
    (first, second), _ = trained(folder, runs=2, toy={"enabled": True})
    calls = [tuple(call) for call in first["calls"][: first["attached"]]]
    verbs = [verb for verb, _ in calls]
    assert verbs[:3] == ["propose", "install", "withdraw"]
    proposed = [asked for verb, asked in calls if verb == "propose"]
    assert len(set(proposed)) == len(proposed) == 2 and min(proposed) > 0, "each program proposed once"
    assert calls[1] == calls[-1] == ("install", proposed[0]), "the first program's part is in force again"
    assert first["calls"][-1] == ["withdraw", 0], "detached"
    assert first["states"][11] == first["states"][21] == "serving", "the arena follows it"
    assert first["reports"][0] == "waiting" and first["reports"][11] == first["reports"][21] == "summing"

    kept = [json.loads(file.read_text()) for file in (folder / "plans").glob("*.json")]
    assert sorted(plan["parts"]["toy"]["asked_bytes"] for plan in kept) == sorted(proposed)

    assert second["losses"] == first["losses"]
    assert {verb for verb, _ in second["calls"][: second["attached"]]} == {"install"}, "nothing is proposed again"
    assert set(second["states"]) == {"serving"}


@pytest.mark.long
def test_part_refused_by_the_judge_is_never_installed(folder: Path) -> None:
    (run,), log = trained(folder, runs=1, toy={"enabled": True, "least_bytes": 10**15})
    assert [verb for verb, _ in run["calls"]] == ["propose", "withdraw", "withdraw"]
    assert "goes on without the toy: the judge refuses the plan" in log
    assert run["states"][11] == "serving", "the arena plans as if there were no such technique"
    assert run["reports"][0] == "waiting" and run["reports"][11] == "off"


@pytest.mark.long
def test_technique_not_enabled_in_the_block_does_nothing(folder: Path) -> None:
    (run,), _ = trained(folder, runs=1)
    assert run["calls"] == [] and set(run["reports"]) == {"off"}
