"""A second run of a job is planned from its first step, and the arena serves that step."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memplug.arena.plan.part import AddressPlan
from memplug.arena.technique import ArenaState
from memplug.plans import plan_file
from memplug.session.table import Stage
from memplug.tokenwise.plan.decisions import Decisions
from tests.support.second_runs import STEPS, Run, folder, kept, only_plan, train
from tests.support.serving import llama, mixtral

__all__ = ["folder", "kept"]


@pytest.mark.device
def test_second_run_has_plan_and_arena_from_its_first_step(kept: tuple[Path, Run], folder: Path) -> None:
    content = only_plan(folder).read_bytes()
    second = train(folder)
    assert second.is_second() and second.losses == kept[1].losses
    assert min(second.shares) == 1.0, "served from the first request on"
    assert second.report["resumed_from"] == str(only_plan(folder))
    assert second.report["arena_served"] > kept[1].report["arena_served"]
    assert only_plan(folder).read_bytes() == content


def test_plan_on_disk_is_the_one_that_ran(kept: tuple[Path, Run]) -> None:
    plan, report = plan_file.load(kept[0]), kept[1].report
    decisions, addresses = Decisions.of(plan), AddressPlan.of(plan)
    assert decisions is not None and addresses is not None and plan.training.program is not None
    assert sorted(decisions.settings) == ["model.layers.0", "model.layers.1"]
    assert decisions.solution.host_bytes == report["predicted_host_bytes"]
    assert addresses.predictions.arena_bytes == kept[1].arena_bytes
    names = plan.training.program.names
    assert "aten::mm" in names and len(plan.training.program.operators) > 200
    assert plan.fingerprint.inputs == ("int64[2, 16], int64[2, 16]",)
    assert not plan.training.gradients_stay


def test_mixture_resumes_from_its_plan(tmp_path: Path) -> None:
    first, second = (train(tmp_path, mixtral) for _ in range(2))
    assert first.report["resumed_from"] is None and second.is_second()
    assert second.losses == first.losses
    assert min(second.shares) > 0.9, "routing differs in each step"


def test_run_with_persistent_gradients_resumes_from_its_plan(tmp_path: Path) -> None:
    first, second = (train(tmp_path, keeps_gradients=True) for _ in range(2))
    assert plan_file.load(only_plan(tmp_path)).training.gradients_stay
    assert second.is_second() and second.losses == first.losses
    assert min(second.shares) == 1.0


def test_run_with_only_the_arena_resumes_from_its_plan(tmp_path: Path) -> None:
    block = {"tokenwise": {"enabled": False}}
    first, second = (train(tmp_path, block=block) for _ in range(2))
    assert first.states[0] is not ArenaState.SERVING and set(second.states) == {ArenaState.SERVING}
    assert (second.report["arena_plans"], second.report["recorded_steps"]) == (0, 0)
    assert second.losses == first.losses and min(second.shares) == 1.0


def test_run_without_the_arena_resumes_from_its_plan(tmp_path: Path) -> None:
    block = {"arena": {"enabled": False}}
    first, second = (train(tmp_path, block=block) for _ in range(2))
    assert first.stages[0] is Stage.WARM_UP and set(second.stages) == {second.before[0]} == {Stage.STABLE}
    assert (second.report["replans"], second.report["planned_steps"]) == (0, STEPS)
    assert second.losses == first.losses


def test_run_that_ends_before_it_has_addresses_keeps_its_decisions_on_disk(tmp_path: Path) -> None:
    first = train(tmp_path, steps=4)
    assert first.stages[-1] is Stage.STABLE and ArenaState.SERVING not in first.states
    second, third = train(tmp_path), train(tmp_path)
    assert set(second.stages) == {second.before[0]} == {Stage.STABLE}
    assert (second.report["replans"], second.report["arena_plans"]) == (0, 1) and second.states[
        -1
    ] is ArenaState.SERVING
    assert second.losses[:4] == first.losses[:4]
    assert third.is_second() and third.losses == second.losses
    only_plan(tmp_path)


def with_unknown_part(file: Path) -> dict[str, Any]:
    """Add the part of an unknown technique, and return it."""
    plan, part = plan_file.load(file), {"rows": [1, 2, 3]}
    plan_file.save(replace(plan, parts={**plan.parts, "later": part}), file)
    return part


def test_part_of_unknown_technique_is_kept_and_logged(
    kept: tuple[Path, Run], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = with_unknown_part(only_plan(folder))
    with caplog.at_level(logging.WARNING, "memplug"):
        second = train(folder)
    assert second.is_second() and second.losses == kept[1].losses
    assert plan_file.load(only_plan(folder)).parts["later"] == part
    assert "has parts that no technique here reads: later" in caplog.text


def test_unknown_part_survives_new_addresses_but_not_new_decisions(tmp_path: Path) -> None:
    train(tmp_path, steps=4)  # decisions only
    part = with_unknown_part(only_plan(tmp_path))
    train(tmp_path)
    plan = plan_file.load(only_plan(tmp_path))
    assert sorted(plan.parts) == ["arena", "later", "tokenwise"] and plan.parts["later"] == part
    plan_file.save(replace(plan, fingerprint=replace(plan.fingerprint, device="other")), only_plan(tmp_path))
    train(tmp_path)  # plans anew, like a first run
    assert sorted(plan_file.load(only_plan(tmp_path)).parts) == ["arena", "tokenwise"]


def test_second_run_knows_every_program_of_the_first(tmp_path: Path) -> None:
    # halfway, the sequence length changes for good
    halves = {"length": lambda step: 16 if step < 14 else 24, "steps": 28}
    first, second = (train(tmp_path, **halves) for _ in range(2))
    assert first.report["replans"] == first.report["arena_plans"] == 2 and len(list(tmp_path.glob("*.json"))) == 2
    assert second.report["replans"] == second.report["arena_plans"] == second.report["recorded_steps"] == 0
    assert second.losses == first.losses


def test_compiled_model_resumes_from_its_plan(tmp_path: Path) -> None:
    def compiled() -> nn.Module:
        torch.compiler.reset()  # as in a process of its own
        network = llama()
        network.compile(backend="eager")
        return network

    block = {"tokenwise": {"enabled": False}}
    first, second = (train(tmp_path, compiled, block=block) for _ in range(2))
    assert second.losses == first.losses and set(second.states) == {ArenaState.SERVING}
    assert (second.report["arena_plans"], second.report["recorded_steps"]) == (0, 0)
