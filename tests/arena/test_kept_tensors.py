"""Scripts that keep tensors from step to step: the arena goes on serving, and its memory does not grow."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import keeping
from tests.support.keeping import KEEPERS, Keeper, Kept, train_keeping, values
from tests.support.serving import nothing_leaks, reserved_bytes

OFF = {"enabled": False}
REGIONS = {"regions": ["[1-2]"], "min_offload_bytes": 256}
AT_ONCE = {"enabled": True, "plan_dir": False, "profiler": {"wait_for_plans": True}}
ALONE = {**AT_ONCE, "tokenwise": {"enabled": False, **REGIONS}}
SWAPPED = {**AT_ONCE, "tokenwise": {"alpha": 1, **REGIONS}}
CHECKED = {**ALONE, "arena": {"checks": True}}
SHORT = ("features", "gradients", "every_seventh", "activation_view", "evaluation", "freed_at_once", "later")


def train_and_check_serving(
    keeper: Keeper,
    block: dict[str, Any],
    steps: int,
    settled: int,
    late: int = 100,
    length: Callable[[int], int] = lambda step: 16,
) -> Kept:
    """Train; check that memory stops growing at step `settled`, and that the last `late` steps are served."""
    gc.collect()
    before = reserved_bytes()
    run, plain = (train_keeping(keeper, each, steps, length) for each in (block, OFF))
    assert run.losses == plain.losses
    assert all(torch.equal(*pair) for pair in zip(values(run.kept), values(plain.kept), strict=True))
    assert run.share(late) >= 0.98
    assert max(run.reserved[settled:]) <= max(run.reserved[:settled])
    assert max(run.reserved) - before <= 2 * run.reserved[20]
    return run


@pytest.mark.long
@pytest.mark.parametrize("keeper", KEEPERS, ids=lambda keeper: keeper.__name__)
def test_arena_serves_two_thousand_steps_in_constant_memory(keeper: Keeper) -> None:
    run = train_and_check_serving(keeper, {**SWAPPED, "tokenwise": REGIONS}, 2000, 300)
    assert run.report["arena_plans"] <= 2


@pytest.mark.long
@pytest.mark.parametrize("block", [ALONE, SWAPPED], ids=["alone", "swapped"])
@pytest.mark.parametrize("name", SHORT)
def test_arena_serves_three_hundred_steps_in_constant_memory(name: str, block: dict[str, Any]) -> None:
    with nothing_leaks():
        run = train_and_check_serving(getattr(keeping, name), block, 300, 150)
        assert run.report["arena_plans"] == 1
        assert run.report["arena_lasting"] > 0
        del run


@pytest.mark.parametrize("name", ["every_seventh", "evaluation_cleared", "sizes"])
def test_arena_never_writes_to_kept_tensors(name: str) -> None:
    """Enable the arena's checks, with which a stray write ends the training."""
    run, plain = (train_keeping(getattr(keeping, name), each, 120) for each in (CHECKED, OFF))
    assert run.losses == plain.losses
    assert all(torch.equal(*pair) for pair in zip(values(run.kept), values(plain.kept), strict=True))


def test_arena_serves_alternating_programs_in_constant_memory() -> None:
    """Keep a tensor of every step; in the first step after each change, the arena still serves by the previous plan."""
    block = {**SWAPPED, "tokenwise": REGIONS}
    length = lambda step: (24, 16)[step // 20 % 2]  # noqa: E731
    run = train_and_check_serving(keeping.features, block, 400, 160, late=15, length=length)
    assert run.report["arena_plans"] <= 3


def test_annex_is_released_with_the_last_leftover() -> None:
    def keeper(t: keeping.Training) -> None:
        if t.step == 20:
            t.kept.append(t.inside[0].clone())
        if t.step == 40:
            t.kept.clear()

    run = train_keeping(keeper, ALONE, 60)
    assert run.reserved[19] < run.reserved[39] < 2 * run.reserved[19]
    assert run.reserved[59] == run.reserved[19]
    assert run.report["arena_leftover_bytes"] == 0 and run.report["arena_plans"] == 1
