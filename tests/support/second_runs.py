"""Trainings that keep their plan in a folder, and later runs that resume from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.arena.technique import ArenaState
from memplug.session.table import Stage
from tests.support.serving import llama

STEPS = 14
SMALL = {"tokenwise": {"min_offload_bytes": 1}, "profiler": {"warmup_steps": 1, "policy_steps": 0}}
FIRST = [Stage.WARM_UP, Stage.GEN_POLICY, Stage.STABLE]  # stages after each of the first steps of a first run


@dataclass
class Run:
    """The results of a training: losses, the states of session and arena after each step, and the last report."""

    losses: list[float] = field(default_factory=list)
    before: tuple[Stage, ArenaState | None] = (Stage.OFF, None)
    stages: list[Stage] = field(default_factory=list)
    states: list[ArenaState | None] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    arena_bytes: int = 0  # size of the last plan that served

    def is_first(self) -> bool:
        """Return whether the run went through all stages, and made its own plans."""
        return self.stages[: len(FIRST)] == FIRST and self.report["replans"] == self.report["arena_plans"] == 1

    def is_second(self) -> bool:
        """Return whether the run had decisions and addresses from the first step on, and planned nothing."""
        report = self.report
        made = report["replans"], report["arena_plans"], report["recorded_steps"]
        return (
            made == (0, 0, 0)
            and report["planned_steps"] == len(self.stages)
            and {self.before[0], *self.stages} == {Stage.STABLE}
            and set(self.states) == {ArenaState.SERVING}
        )


def train(
    folder: Path,
    model: Callable[[], nn.Module] = llama,
    *,
    batch: int = 2,
    steps: int = STEPS,
    keeps_gradients: bool = False,
    micro_batches: int = 1,
    length: Callable[[int], int] = lambda step: 16,
    block: dict[str, Any] | None = None,
) -> Run:
    """Train with AdamW, which makes its state in the first step; equal arguments give equal tokens."""
    torch.manual_seed(0)
    network, run = model(), Run()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    tokens = torch.Generator("cpu").manual_seed(1)
    with memplug.attach(network, {"enabled": True, "plan_dir": str(folder), **SMALL, **(block or {})}) as session:
        run.before = session.stage, None
        for step in range(steps):
            for _ in range(micro_batches):
                ids = torch.randint(0, 64, (batch, length(step)), generator=tokens, device="cpu").to(network.device)
                loss = network(ids, labels=ids).loss
                loss.backward()
                run.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keeps_gradients)
            session.step()
            run.stages.append(session.stage)
            serving = session._attached.boundary.followers.find("arena")
            run.states.append(serving.state if serving is not None else None)
            counted = serving.step if serving is not None else None
            run.shares.append(counted.from_arena / max(1, counted.from_arena + counted.fallback) if counted else 0.0)
        run.report = session.report().as_dict()
        if run.states[-1] is ArenaState.SERVING:
            run.arena_bytes = session._attached.boundary.followers.find("arena").plan.predictions.arena_bytes
    run.losses.append(sum(parameter.double().sum().item() for parameter in network.parameters()))
    return run


def only_plan(folder: Path) -> Path:
    """Return the only plan file in the folder."""
    (file,) = folder.glob("*.json")
    return file


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Return a plan's file, to which no test may write, and the results of the run that kept the plan."""
    folder = tmp_path_factory.mktemp("kept")
    first = train(folder)
    assert first.is_first() and first.report["resumed_from"] is None and first.report["not_resumed_because"] is None
    return only_plan(folder), first


@pytest.fixture
def folder(kept: tuple[Path, Run], tmp_path: Path) -> Path:
    """Return a folder of the test's own that contains the kept plan."""
    mine = tmp_path / "plans"
    mine.mkdir()
    (mine / kept[0].name).write_bytes(kept[0].read_bytes())
    return mine
