"""Gradients hold (equal those of the model without memplug) for every kind of forward and parameter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.blocks import (
    Layer,
    Stack,
    alphas,
    assert_clean,
    assert_same,
    gradients,
    tokenwise,
    train_alike,
    twin,
)
from tests.support.forwards import FORWARDS, Plain
from tests.support.simulated import adversarial_device

pytestmark = pytest.mark.device


@alphas
@pytest.mark.parametrize("block", FORWARDS, ids=lambda block: block.__name__)
def test_gradients_hold_for_every_kind_of_forward(block: Callable[[], nn.Module], alpha: float) -> None:
    train_alike(block, alpha)


@alphas
@pytest.mark.parametrize("block", FORWARDS, ids=lambda block: block.__name__)
def test_gradients_hold_for_every_forward_while_copies_run_late(block: Callable[[], nn.Module], alpha: float) -> None:
    train_alike(block, alpha, device=adversarial_device("late"))


@pytest.mark.parametrize("alpha", [0.0, 1.0])  # exact, since all matmuls run again, or none does
@pytest.mark.parametrize("block", FORWARDS, ids=lambda block: block.__name__)
def test_gradients_hold_while_small_tensors_stay_on_the_device(block: Callable[[], nn.Module], alpha: float) -> None:
    train_alike(block, alpha, min_offload_bytes=1 << 30)


@alphas
def test_gradients_hold_with_frozen_parameters_and_adapters(alpha: float) -> None:
    class Adapted(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return x + self.out(F.silu(self.inner(y) + self.up(self.down(y))))

    train_alike(Adapted, alpha)


@alphas
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_hold_with_a_weight_shared_by_regions(alpha: float, autocast: bool) -> None:
    torch.manual_seed(0)
    model = Stack(3, Plain)
    model.layers[2].inner.weight = model.layers[0].inner.weight
    model.layers[1].out.weight = nn.Parameter(model.layers[0].inner.weight.detach().t().clone())
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for x in torch.randn(2, 2, 6, 16):
        for network in (model, reference):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = network(x)
            loss.backward()
            del loss
        measured, expected = gradients(model), gradients(reference)
        if autocast:  # the shared weight's gradient may be summed in bf16 or in fp32
            for name in measured:
                torch.testing.assert_close(measured[name], expected[name], rtol=0.02, atol=0.002)
        else:
            assert_same(measured, expected, exact=alpha in (0, 1))
    assert_clean(executor)


@alphas
def test_gradients_hold_under_autocast_to_the_bit(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for x in torch.randn(2, 2, 6, 16):
        for network in (model, reference):
            with torch.autocast("cpu", torch.bfloat16):
                loss = network(x)
            loss.backward()
            del loss
        measured, expected = gradients(model), gradients(reference)
        if alpha in (0, 1):
            assert_same(measured, expected)
        for name in measured:
            torch.testing.assert_close(measured[name], expected[name], rtol=0.02, atol=0.002)
    assert_clean(executor)
