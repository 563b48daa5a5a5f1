"""Custom autograd functions whose kernels choose by values, as a fused router does.

A second run on rounded values could choose differently.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.blocks import Layer
from tests.support.hidden import hidden
from tests.support.hidden_functions import ran, train

pytestmark = pytest.mark.device


class Router(torch.autograd.Function):
    """Returns the values and the mask of the larger half of each row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ran.append("Router")
        with hidden():
            chosen = torch.zeros_like(logits, dtype=torch.bool)
            chosen.scatter_(-1, logits.topk(logits.shape[-1] // 2).indices, True)
            values = logits.sigmoid() * chosen
        ctx.save_for_backward(values)
        ctx.mark_non_differentiable(chosen)
        return values, chosen

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
        (values,) = ctx.saved_tensors
        return gradient * values * (1 - values)


class Sorted(torch.autograd.Function):
    """Puts rows in a given order, and also returns the inverse order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ran.append("Sorted")
        with hidden():
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order))
            out = x[order]
        ctx.save_for_backward(back)
        ctx.mark_non_differentiable(back)
        return out, back

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        (back,) = ctx.saved_tensors
        return gradient[back], None


class Routed(Layer):
    """A layer that reorders rows by its router's choice, and back again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, chosen = Router.apply(self.inner(x).flatten(0, 1))
        order = chosen.sum(-1).argsort(stable=True)
        rows, back = Sorted.apply(values * 2.0, order)
        return x + self.out((rows * chosen.sigmoid())[back].sin()).view_as(x)


@pytest.mark.parametrize("alpha", [0.0, 1.0, "auto"])
def test_router_that_chooses_by_values_never_runs_again(alpha: float | str) -> None:
    report = train(Routed, alpha=alpha)
    assert report["opaque_regions"] == 0
    assert report["ran"]["Router"] == 3, "one for each layer"
    assert report["ran"]["Sorted"] == (6 if alpha == 0.0 else 3) or alpha == "auto"
