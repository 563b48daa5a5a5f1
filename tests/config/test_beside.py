"""Planning beside training: a process of its own, which no step waits for, and which leaves nothing behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import memplug
import tests
from memplug.arena import planning
from memplug.arena.technique import ArenaState
from memplug.beside import Beside
from memplug.errors import LayoutError
from memplug.session.table import Stage
from memplug.tokenwise import candidates
from tests.support import tasks
from tests.support.serving import llama


@pytest.fixture(autouse=True)
def plans_beside_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Beside, "__init__", tests.made_as_users_do)


def done(beside: Beside) -> Beside:
    deadline = time.monotonic() + 60
    while not beside.is_done:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return beside


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "memplug.plans.worker" in command_line(each)]


def command_line(process: psutil.Process) -> list[str]:
    """Return the command line, which is empty for an instant after a process has started, and once it has ended."""
    deadline = time.monotonic() + 5
    while not (words := process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return words


# -- one task ----------------------------------------------------------------------------------------------------------


def test_task_runs_in_another_process_and_returns_its_result() -> None:
    beside = Beside(waits=False)
    assert not beside.is_busy
    beside.begin(os.getpid)
    assert beside.is_busy and done(beside).take() != os.getpid()
    assert not beside.is_busy and not children()


def test_task_runs_in_this_process_if_training_waits_for_plans() -> None:
    beside = Beside(waits=True)
    beside.begin(os.getpid)
    assert beside.is_done and beside.take() == os.getpid()


def test_error_of_a_task_is_raised_with_its_advice() -> None:
    beside = Beside(waits=False)
    beside.begin(tasks.fails, "no addresses")
    with pytest.raises(LayoutError, match="no addresses") as raised:
        done(beside).take()
    assert raised.value.advice == "Do something else." and not beside.is_busy


def test_taking_a_result_waits_for_its_task() -> None:
    beside = Beside(waits=False)
    beside.begin(time.sleep, 0.5)
    assert not beside.is_done and beside.take() is None


def test_stopped_task_leaves_no_process_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    beside = Beside(waits=False)
    beside.begin(time.sleep, 60)
    assert len(children()) == 1 and len(list(tmp_path.iterdir())) == 1
    beside.begin(time.sleep, 61)
    assert len(children()) == 1, "only the new task runs"
    beside.stop()
    assert not beside.is_busy and not children() and not list(tmp_path.iterdir())


def test_task_ends_when_its_owner_is_deleted() -> None:
    beside = Beside(waits=False)
    beside.begin(time.sleep, 60)
    del beside
    assert not children()


def test_task_runs_in_this_process_with_a_warning_if_its_process_dies(caplog: pytest.LogCaptureFixture) -> None:
    beside = Beside(waits=False)
    beside.begin(tasks.ends_its_process)
    assert done(beside).take() == 7
    assert "training waits for this one plan" in caplog.text


def test_task_runs_in_this_process_with_a_warning_if_no_process_starts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    beside = Beside(waits=False)
    beside.begin(os.getpid)
    assert beside.is_done and beside.take() == os.getpid()
    assert "training waits for this one plan" in caplog.text


@pytest.mark.parametrize("module", [planning, candidates])
def test_planning_imports_no_torch(module: Any) -> None:
    beside = Beside(waits=False)
    beside.begin(tasks.imported_with, module.__name__)
    assert "torch" not in done(beside).take()


# -- training meanwhile ------------------------------------------------------------------------------------------------


def train(until: Any, **block: Any) -> tuple[list[float], list[tuple[Stage, ArenaState]], memplug.Session]:
    """Train until `until` is true; return the losses, the stages after each step, and the session.

    A stage is a pair: the session's stage and its arena's state.
    """
    torch.manual_seed(0)
    network = llama()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    tokens = torch.Generator().manual_seed(1)
    losses: list[float] = []
    stages: list[tuple[Stage, ArenaState]] = []
    settings = {"tokenwise": {"min_offload_bytes": 1}, "profiler": {"warmup_steps": 1, "policy_steps": 0}}
    with memplug.attach(network, {"enabled": True, "plan_dir": False, **settings, **block}) as session:
        deadline = time.monotonic() + 120
        while not until(stages):
            assert time.monotonic() < deadline, stages[-1]
            ids = torch.randint(0, 64, (2, 16), generator=tokens)
            loss = network(ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            stages.append((session.stage, session._attached.boundary.followers.find("arena").state))
    return losses, stages, session


def serves(stages: list[tuple[Stage, ArenaState]]) -> bool:
    return len(stages) > 3 and all(state is ArenaState.SERVING for _, state in stages[-3:])


@pytest.mark.long
def test_training_continues_while_planning_and_adopts_plans_later() -> None:
    losses, stages, session = train(serves)
    seen = list(dict.fromkeys(stages))
    assert [stage for stage, _ in seen][:3] == [Stage.WARM_UP, Stage.GEN_POLICY, Stage.STABLE]
    states = [state for _, state in stages]
    assert states.count(ArenaState.PLANNING) > 1, "no step waited for addresses"
    assert [stage for stage, _ in stages].count(Stage.GEN_POLICY) > 2, "no step waited for decisions"
    report = session.report()
    assert report.replans == 1 and report.recorded_steps < 8, "steps while something is planned are not recorded"
    enough = len(losses)
    assert losses == train(lambda stages: len(stages) == enough, profiler={"wait_for_plans": True})[0]
    assert not children()


def test_session_detached_while_planning_leaves_no_process() -> None:
    _, stages, _ = train(lambda stages: stages and stages[-1][1] is ArenaState.PLANNING)
    assert stages[-1][1] is ArenaState.PLANNING and not children()
