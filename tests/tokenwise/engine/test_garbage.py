"""Operators that garbage collection runs in the middle of a forward do not belong to the region."""

from __future__ import annotations

import gc

import pytest
import torch

from memplug.tokenwise.engine.core import core
from tests.support.blocks import Layer, Stack, assert_same, gradients, tokenwise, twin

pytestmark = pytest.mark.device


class Dies:
    """Cyclic garbage whose destructor runs operators."""

    def __init__(self) -> None:
        self.itself = self
        self.tensor = torch.ones(3)

    def __del__(self) -> None:
        self.tensor.add_(1).is_pinned()
        torch.randn(2)


class Collects(Layer):
    """A layer that collects garbage in its forward; a recompute pass finds no garbage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.norm(x))
        gc.collect()
        return x + self.out(torch.nn.functional.gelu(hidden))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_operators_of_finalizers_are_neither_recorded_nor_replayed(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(2, Collects)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for x in torch.randn(2, 2, 6, 16):
        Dies()
        model(x).backward()
        reference(x).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha != 0.5)
    assert executor.divergences == 0 and core().paused() == 0
