"""Custom autograd functions whose backward kernels write over saved tensors that other operators still need.

Fused gated MLPs do this.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.hidden import hidden
from tests.support.hidden_functions import Gated, Pairs, launch, over, train

pytestmark = pytest.mark.device

ALPHAS = [0.0, 1.0, "auto"]


class GatedBeside(nn.Module):
    """A layer in which a unit's backward overwrites matmul outputs that other operators need too."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate(x), self.up(x)
        return x + (gate * 2.0).sigmoid() * (up - 1.0).tanh() + Gated.apply(gate, up)


class Sine(torch.autograd.Function):
    """A function whose backward writes its gradient over its saved argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        with hidden():
            out = x.sin()
        launch(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with hidden():
            of_x = gradient * x.cos()
        return over(x, of_x)


class SineOfInput(nn.Module):
    """A layer that adds the sine of the region's input; the sine's backward runs last.

    Other operators on that input save only their outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = Sine.apply(x)
        return self.inner((x * 2.0).sigmoid() * (x - 1.0).tanh()) + out


class SineOfInputFirst(SineOfInput):
    """Like `SineOfInput`, but the sine's backward runs first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner((x * 2.0).sigmoid() * (x - 1.0).tanh())
        return out + Sine.apply(x)


class Beside(nn.Module):
    """A region whose backward needs its input, although autograd does not save it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2.0).sigmoid() * (x - 1.0).tanh()


class Shares(nn.Module):
    """Regions that share one input; the function of the region in the middle writes over that input in backward."""

    layer: type[nn.Module] = SineOfInput

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList([Beside(), self.layer(), Beside(), Beside(), self.layer(), Beside()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for i in range(0, len(self.layers), 3):
            x = sum(layer(x) for layer in self.layers[i : i + 3])
        return x.square().mean()


class SharesFirst(Shares):
    """Like `Shares`, but the sine's backward runs first."""

    layer = SineOfInputFirst


class Makes(nn.Module):
    """A region that returns a matmul output and a result of it; recomputing other tensors needs the matmul output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x)
        return self.out((y * 2.0).sigmoid()), y


class SineOfSecond(nn.Module):
    """A region that adds the sine of the previous region's output."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + Sine.apply(y)


class MadeAndWritten(Pairs):
    """One region's output is the input of another region, which overwrites it in backward."""

    first, second = Makes, SineOfSecond


@pytest.mark.parametrize("min_offload_bytes", [1, 1 << 20])
@pytest.mark.parametrize("alpha", [*ALPHAS, "memo"])
@pytest.mark.parametrize("layer", [GatedBeside, SineOfInput, SineOfInputFirst])
def test_backward_overwriting_saved_tensor_leaves_other_readers_intact(
    layer: type[nn.Module], alpha: float | str, min_offload_bytes: int
) -> None:
    train(layer, alpha=alpha, min_offload_bytes=min_offload_bytes)


@pytest.mark.parametrize("min_offload_bytes", [1, 1 << 20])
@pytest.mark.parametrize("alpha", [*ALPHAS, "memo"])
@pytest.mark.parametrize("network", [Shares, SharesFirst, MadeAndWritten])
def test_backward_overwriting_its_input_leaves_other_regions_intact(
    network: type[nn.Module], alpha: float | str, min_offload_bytes: int
) -> None:
    train(network=network, alpha=alpha, min_offload_bytes=min_offload_bytes)
