"""Regions that get the same memory more than once, and write to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.blocks import Layer
from tests.support.hidden_functions import Unsaid, train

pytestmark = pytest.mark.device


class WritesSecond(Layer):
    """A layer whose kernel writes to its last argument, and reads that memory through the first."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        Unsaid.apply(others[-1])
        return x + self.out(self.inner(x).sigmoid())


class OperatorWritesSecond(Layer):
    """A layer whose operator writes to its last argument; since the layer takes an address, it is always opaque."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        others[-1].mul_(2.0)
        x.data_ptr()
        return x + self.out(self.inner(x).sigmoid())


class Twice(nn.Module):
    """Regions that get their input twice."""

    layer: type[nn.Module] = WritesSecond
    scales = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList(self.layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale if self.scales else x.clone()
        for layer in self.layers:
            x = layer(*self.given(x))
        return x.square().mean()

    def given(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, x.detach()


class TwiceItself(Twice):
    """Regions that get the same tensor twice."""

    def given(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, x


class TwiceWithoutGradients(Twice):
    """Regions of which the first gets an input that requires no gradient."""

    scales = False


class TwiceInParts(Twice):
    """Regions that get two overlapping views."""

    def given(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, x.view(-1, 16)[:3]


class Thrice(Twice):
    """Regions that get three arguments; the last is contiguous, and of another shape."""

    def given(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, x.transpose(0, 1), x.detach().flatten()[8:40]


@pytest.mark.parametrize("min_offload_bytes", [1, 1 << 20])
@pytest.mark.parametrize("alpha", [0.0, 1.0, "auto"])
@pytest.mark.parametrize("writes", [WritesSecond, OperatorWritesSecond])
@pytest.mark.parametrize("network", [Twice, TwiceItself, TwiceWithoutGradients, TwiceInParts, Thrice])
def test_input_passed_twice_stays_one_storage_in_recompute_pass(
    network: type[nn.Module], writes: type[nn.Module], alpha: float | str, min_offload_bytes: int
) -> None:
    report = train(
        network=type(network.__name__, (network,), {"layer": writes}), alpha=alpha, min_offload_bytes=min_offload_bytes
    )
    assert report["opaque_regions"] == (0 if writes is WritesSecond else 3)
