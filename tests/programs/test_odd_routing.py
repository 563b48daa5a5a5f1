"""Mixtures of experts train to the bit however odd their routing is, and few plans serve them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.odd_routing import Choice, trained

CHOICES: dict[str, Callable[[int], Choice]] = {
    "router's": lambda step: Choice(),
    "all tokens to one expert, another in each step": lambda step: Choice(only=step % 4),
    "all tokens to one expert after a while": lambda step: Choice(only=2 if step > 14 else None),
    "no tokens in some steps": lambda step: Choice(only=-1 if step % 5 == 3 else None),
    "dropped beyond a capacity": lambda step: Choice(capacity=10 + step % 7),
    "another in evaluation": lambda step: Choice(evaluates=step % 4 == 3),
    "twice the tokens once": lambda step: Choice(tokens=192 if step == 17 else 96),
    "frozen experts in some steps": lambda step: Choice(frozen=(0, 2) if step % 6 == 5 else ()),
}


@pytest.mark.parametrize(
    "alpha",
    [pytest.param(None, marks=pytest.mark.long), pytest.param(0.0, marks=pytest.mark.long), 1.0],
    ids=["kept", "recomputed", "swapped"],
)
@pytest.mark.parametrize("name", CHOICES)
def test_odd_routing_changes_neither_losses_nor_weights(name: str, alpha: float | None) -> None:
    tokenwise = {"enabled": False} if alpha is None else {"alpha": alpha, "min_offload_bytes": 1}
    settings = {
        "enabled": True,
        "plan_dir": False,
        "tokenwise": tokenwise,
        "profiler": {"wait_for_plans": True},
        "arena": {"checks": True},
    }
    losses, weights, _ = trained(CHOICES[name], 30, None)
    own_losses, own_weights, report = trained(CHOICES[name], 30, settings)
    assert own_losses == losses and all(map(torch.equal, own_weights, weights))
    assert report["arena"] == "serving" and report["arena_plans"] <= 2
