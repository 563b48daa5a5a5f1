"""Training with memplug on the simulated device equals training without, to the bit, under any schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cudasim.device import SCHEDULES, Schedule, scheduled
from tests.cudasim.training import CASES, reference, train

pytestmark = pytest.mark.gpu

RANDOM = [Schedule("random", seed) for seed in range(1, 4)]


def selected(name: str) -> list[Any]:
    """Return a case under each schedule; all but two schedules, which vary from case to case, are marked as long."""
    schedules = [*SCHEDULES[1:], *RANDOM, SCHEDULES[0]]
    first = 2 * list(CASES).index(name)
    short = {schedules[(first + i) % len(schedules)] for i in range(2)}
    marks = {schedule: () if schedule in short else pytest.mark.long for schedule in schedules}
    return [pytest.param(name, schedule, id=f"{name}-{schedule}", marks=mark) for schedule, mark in marks.items()]


@pytest.mark.parametrize(("name", "schedule"), [case for name in CASES for case in selected(name)])
def test_losses_and_gradients_equal_those_without_memplug(name: str, schedule: Schedule) -> None:
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
