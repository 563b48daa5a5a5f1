"""Training with memplug on the simulated device equals training without, to the bit, whatever the schedule."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.cudasim.device import SCHEDULES, Schedule, scheduled
from tests.cudasim.training import ALONE, Case, Trained, block, train

pytestmark = pytest.mark.gpu

ARENA = {"enabled": True, "plan_dir": False, "tokenwise": {"enabled": False}}
CASES = {
    "alpha 0": Case(block(0.0, **ALONE)),
    "alpha 0.3": Case(block(0.3, **ALONE)),
    "alpha 0.5": Case(block(0.5, **ALONE)),
    "alpha 1": Case(block(1.0, **ALONE)),
    "alpha 1, bf16": Case(block(1.0, **ALONE), dtype=torch.bfloat16),
    "alpha 0.3, autocast": Case(block(0.3, **ALONE), autocast=True),
    "alpha 0, dropout": Case(block(0.0, **ALONE), dropout=0.2),
    "alpha 0.5, dropout": Case(block(0.5, **ALONE), dropout=0.2),
    "alpha 1, arena": Case(block(1.0), steps=10),
    "alpha 0.5, arena": Case(block(0.5), steps=10),
    "arena alone": Case(ARENA, steps=10),
    "arena, checked": Case({**ARENA, "arena": {"checks": True}}, steps=10),
    "arena, checked, side stream": Case({**ARENA, "arena": {"checks": True}}, steps=10, side_stream=True),
    "auto": Case(block(), steps=12),
    "auto, bf16, micro-batches": Case(block(), steps=12, dtype=torch.bfloat16, micro_batches=2),
    "auto, no arena": Case(block(arena={"enabled": False}), steps=12),
    "auto, side stream": Case(block(), steps=12, side_stream=True),
    "default": Case({"enabled": True, "plan_dir": False}, steps=12),
}
RANDOM = [Schedule("random", seed) for seed in range(1, 4)]


def selected(name: str) -> list[Any]:
    """Each schedule, of which two run for every case unless the long tests are asked for: not the same for all."""
    schedules = [*SCHEDULES[1:], *RANDOM, SCHEDULES[0]]
    first = 2 * list(CASES).index(name)
    short = {schedules[(first + i) % len(schedules)] for i in range(2)}
    marks = {schedule: () if schedule in short else pytest.mark.long for schedule in schedules}
    return [pytest.param(name, schedule, id=f"{name}-{schedule}", marks=mark) for schedule, mark in marks.items()]


@functools.cache
def reference(name: str) -> Trained:
    """Without memplug, once; a schedule changes nothing of it."""
    return train(CASES[name], with_memplug=False)


@pytest.mark.parametrize(("name", "schedule"), [case for name in CASES for case in selected(name)])
def test_losses_and_gradients_are_those_without_memplug(name: str, schedule: Schedule) -> None:
    expected = reference(name)
    with scheduled(schedule):
        found = train(CASES[name])
    assert found.losses == expected.losses
    for step, (ours, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert torch.equal(ours, theirs), f"step {step}"
    if "arena" in name and "no arena" not in name:
        assert found.report["arena_served"] > 0
    if name.startswith("auto"):
        assert found.report["stage"] == "stable"
