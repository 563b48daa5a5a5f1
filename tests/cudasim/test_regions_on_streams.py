"""Regions that run a part of their forward on another stream.

Backward, restored tensors and recompute passes are ordered as without memplug, whichever stream first asks for a saved
tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplug.device.device import CudaDevice
from tests.cudasim import device
from tests.cudasim.device import SCHEDULES, Schedule, scheduled
from tests.support import two_streams
from tests.support.extension import Wait, leaving_out_of
from tests.support.two_streams import Beside

pytestmark = pytest.mark.gpu

ORDERS = [*SCHEDULES, Schedule("random", 1)]
ARENA = {
    "off": {"profiler": {"enabled": False}, "arena": {"enabled": False}},
    "on": {"profiler": {"wait_for_plans": True}},
}
STEPS = 12


class WithWeight(Beside):
    """Multiplies by a weight on the other stream, whose outputs memplug then captures too."""

    def __init__(self, side: torch.cuda.Stream):
        super().__init__(side)
        self.across = nn.Linear(64, 64)

    def aside(self, y: torch.Tensor) -> torch.Tensor:
        return self.across(y.sin()).sigmoid()


class AskingAside(nn.Module):
    """In its backward, the other stream is the first to need a saved tensor, so the recompute pass runs there.

    The main stream then reads the pass's results.
    """

    def __init__(self, side: torch.cuda.Stream):
        super().__init__()
        self.up, self.side = nn.Linear(32, 32), side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main, y = torch.cuda.current_stream(), self.up(x)
        u = y.tanh()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            z = y.sin().exp()  # a chain: a sum of gradients would make the main stream wait before it reads `u`
        y.record_stream(self.side)
        main.wait_stream(self.side)
        z.record_stream(main)
        return x + u + z


LAYERS = [Beside, WithWeight, AskingAside]


def tokenwise(alpha: float) -> dict[str, Any]:
    return {"alpha": alpha, "regions": ["[0-2]"], "min_offload_bytes": 256}


def train(
    layer: Callable[[torch.cuda.Stream], nn.Module], block: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    return two_streams.train(lambda side: nn.Sequential(*(layer(side) for _ in range(4))), block, STEPS)


@pytest.mark.parametrize("schedule", ORDERS, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_free_of_races_without_memplug(layer: type[nn.Module], schedule: Schedule) -> None:
    before = device.violations()
    expected, _ = train(layer, {"enabled": False})
    with scheduled(schedule):
        found, _ = train(layer, {"enabled": False})
    assert device.violations() == before
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("schedule", ORDERS, ids=str)
@pytest.mark.parametrize("arena", ARENA)
@pytest.mark.parametrize("alpha", [0, 1])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_access_is_ordered_and_values_are_unchanged(
    layer: type[nn.Module], alpha: float, arena: str, schedule: Schedule
) -> None:
    expected, _ = train(layer, {"enabled": False})
    before = device.violations()
    with scheduled(schedule):
        found, report = train(layer, {"enabled": True, "tokenwise": tokenwise(alpha), **ARENA[arena]})
    assert device.violations() == before
    assert all(map(torch.equal, found, expected))
    assert report["offloaded_bytes"] > 0 and (report["buffer_bytes"] > 0) is (arena == "off")


@pytest.mark.unordered
def test_missing_wait_for_the_restoring_stream_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out one wait; tests/tokenwise/engine/test_races.py leaves out the others."""
    monkeypatch.setattr(CudaDevice, "streams", leaving_out_of(CudaDevice, Wait.USE_FOR_COMPUTE))
    before = device.violations()
    with scheduled(Schedule("copyfirst")):
        train(AskingAside, {"enabled": True, "tokenwise": tokenwise(1), **ARENA["off"]})
    assert device.violations() > before
