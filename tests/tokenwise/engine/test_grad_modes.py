"""Kernels whose outputs depend on the grad mode run again in the mode of their forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memplug.errors import RecomputeError
from tests.support.blocks import Layer, Stack, functional, tokenwise, train_alike


class Recurrent(Layer):
    kind: type[nn.RNNBase] = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.cell = self.kind(16, 16, num_layers=2, batch_first=True, dropout=0.2, bidirectional=True)
        self.join = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.join(self.cell(x)[0].tanh())


class Gated(Recurrent):
    kind = nn.GRU


class Elman(Recurrent):
    kind = nn.RNN


class Unbatched(Layer):
    """A layer that runs a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.step = nn.LSTM(16, 16, batch_first=True), nn.LSTMCell(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            still = self.cell(x)[0]
        return x + self.out(self.inner(still * self.cell(x)[0]).tanh()) + self.step(x[:, 0])[0].unsqueeze(1)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("block", [Recurrent, Gated, Elman, Unbatched])
def test_gradients_of_recurrent_layers_hold_to_the_bit(block: type[Layer], alpha: float) -> None:
    executor = train_alike(block, alpha, steps=3)
    assert executor.divergences == 0 and executor.opaque_regions == 0


def test_recompute_pass_that_diverges_twice_raises(monkeypatch: Any) -> None:
    """Use a library operator that returns another shape in backward."""
    wide = [False]
    with torch.library._scoped_library("memplug_grad_modes", "DEF") as library:
        library.define("part(Tensor x) -> Tensor")
        library.impl("part", lambda x: torch.cat([x, x]) if wide[0] else x.clone(), "CompositeExplicitAutograd")

        def call(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                factor = torch.ops.memplug_grad_modes.part(x.exp())
            return (x * factor).sum()

        layer, executor = functional(call, 0.0)
        loss = layer(torch.randn(4, 4, requires_grad=True) * 1.0)
        wide[0] = True
        with pytest.raises(RecomputeError, match="region layers.0: memplug_grad_modes::part returned"):
            loss.backward()
    assert executor.divergences == 1


class Outer(Layer):
    """A region that runs another region, which is not its submodule."""

    def __init__(self, inner: list[nn.Module]):
        super().__init__()
        self.others = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others[0](x) + self.out(self.inner(x).tanh())


def test_region_with_a_nested_region_is_opaque() -> None:
    model = Stack(1, Unbatched)
    model.layers.append(Outer([model.layers[0]]))
    executor = tokenwise(model, 1.0)
    model(torch.randn(2, 6, 16)).backward()
    assert list(executor.opaque) == ["another region that runs inside of it"]
