"""A mixture whose routing changes in each step trains to the bit under streams that run in any order."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.cudasim import device
from tests.cudasim.device import Schedule, scheduled
from tests.support.mixtures import block, trained

pytestmark = pytest.mark.gpu

FEW = pytest.param(range(2), 24)
MANY = pytest.param(range(2, 50), 24, marks=pytest.mark.long)
LONG = pytest.param(range(50, 51), 300, marks=pytest.mark.long)


@functools.cache
def plain(steps: int) -> tuple[Any, ...]:
    """Return losses and weights without memplug."""
    with torch.device("cuda"):
        return trained(steps, None)


@pytest.mark.parametrize(("seeds", "steps"), [FEW, MANY, LONG], ids=["few", "many", "long"])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_mixture_trains_to_the_bit_under_random_schedules(seeds: range, steps: int, alpha: float) -> None:
    losses, weights, _ = plain(steps)
    for seed in seeds:
        before = device.violations()
        with scheduled(Schedule("random", seed)), torch.device("cuda"):
            own_losses, own_weights, report = trained(steps, block(alpha))
            torch.cuda.synchronize()
        assert device.violations() == before
        assert own_losses == losses and all(map(torch.equal, own_weights, weights)), seed
        assert report["arena_dynamic"] > 0
