"""Trainings whose batches take turns: each kind is planned and served by its own steps, and no result changes."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest

from memplug import native
from memplug.sizes import GIB
from tests.support.turns import RANDOM, Turns, train

WAITS = {"profiler": {"wait_for_plans": True}}
SERVED = 0.98
TENTH = 9  # index of a kind's tenth step

PATTERNS = ["AB", "AAB", "AAAB", "ABC", RANDOM]
SHORT = {RANDOM: 60}
LENGTHS = [
    *((pattern, SHORT.get(pattern, 12 * len(pattern))) for pattern in PATTERNS[:1]),
    *((pattern, SHORT.get(pattern, 12 * len(pattern))) for pattern in PATTERNS[1:]),
    *(pytest.param(pattern, 300, marks=pytest.mark.long) for pattern in PATTERNS),
]


def assert_served(found: Turns) -> None:
    """Assert that before its tenth step each kind is planned and served, and stays so."""
    for kind, shares in found.served.items():
        assert len(shares) > TENTH
        assert min(shares[TENTH - 1 :]) >= SERVED, (kind, shares)
        assert all(found.planned[kind][TENTH - 1 :]), (kind, found.planned[kind])


@pytest.mark.parametrize(("pattern", "steps"), LENGTHS)
def test_each_kind_is_planned_and_served_before_its_tenth_step(pattern: str, steps: int) -> None:
    found = train(pattern, steps, WAITS)
    assert_served(found)
    kinds = len(found.served)
    assert (found.report["programs"], found.report["replans"], found.report["arena_plans"]) == (kinds,) * 3


@pytest.mark.parametrize("pattern", ["AAB", RANDOM])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("steps", [40, pytest.param(300, marks=pytest.mark.long)])
def test_losses_and_weights_are_those_without_memplug_to_the_bit(pattern: str, alpha: float, steps: int) -> None:
    expected = train(pattern, steps, {"enabled": False})
    assert train(pattern, steps, {**WAITS, "tokenwise": {"alpha": alpha}}).equals(expected)


@pytest.mark.device
@pytest.mark.parametrize("pattern", ["AB", "AAAB", RANDOM])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_plans_that_take_turns_change_no_bit(pattern: str, alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from memplug.tokenwise import candidates
    from memplug.tokenwise.plan import solver

    def solve(regions: list[Any], budget: Any, factor: float) -> Any:
        return solver.solve(regions, budget, alpha)

    monkeypatch.setattr(candidates, "_solve_around", solve)
    expected, found = train(pattern, 60, {"enabled": False}), train(pattern, 60, WAITS)
    assert found.equals(expected) and found.report["replans"] == len(found.served)


@pytest.mark.parametrize(("pattern", "steps"), [("AAB", 90), pytest.param("AAB", 300, marks=pytest.mark.long)])
def test_tower_frozen_in_every_third_step_is_foreseen_by_the_order(pattern: str, steps: int) -> None:
    found = train(pattern, steps, WAITS, frozen="B")
    assert found.report["programs"] == found.report["replans"] == found.report["arena_plans"] == 2
    for kind, shares in found.served.items():
        assert min(shares[2 * TENTH :]) >= SERVED, (kind, shares)
    assert found.equals(train(pattern, steps, {"enabled": False}, frozen="B"))


@pytest.mark.parametrize("pattern", ["AB", RANDOM])
def test_plans_that_keep_outputs_take_turns_without_changing_a_bit(pattern: str) -> None:
    found = train(pattern, 60, {**WAITS, "device_budget_gib": 0.0005})
    assert found.equals(train(pattern, 60, {"enabled": False})) and found.report["replans"] == len(found.served)
    assert min(min(shares[2 * TENTH :], default=1.0) for shares in found.served.values()) >= SERVED


@pytest.mark.parametrize("pattern", ["AB", RANDOM])
def test_swap_lists_take_turns_without_changing_a_bit(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memplug")
    gc.collect()
    left = native.load().cpu_bytes()[0]  # by earlier tests: under a budget it is in use
    tight = {**WAITS, "device_budget_gib": 0.0094 + left / GIB, "swap": {"min_bytes": 4096}}
    found = train(pattern, 60, tight, has_tail=True)
    assert found.equals(train(pattern, 60, {"enabled": False}, has_tail=True))
    assert caplog.text.count("predicted peak") == 2, "the longer kinds need a list"
    assert "sizes of its tensors change" not in caplog.text
    assert min(min(shares[2 * TENTH :], default=1.0) for shares in found.served.values()) >= SERVED


@pytest.mark.parametrize("begins_with", ["A", "B"])
def test_next_run_serves_each_kind_from_its_first_step(begins_with: str, tmp_path: Path) -> None:
    block = {**WAITS, "plan_dir": str(tmp_path)}
    first = train("AAB", 45, block)
    assert first.report["replans"] == 2
    second = train("AAB" if begins_with == "A" else "BAA", 12, block)
    assert second.report["resumed_from"] is not None and second.report["replans"] == second.report["arena_plans"] == 0
    for kind, planned in second.planned.items():
        assert all(planned), (kind, planned)
        assert min(second.served[kind][1:]) >= SERVED, (kind, second.served[kind])
