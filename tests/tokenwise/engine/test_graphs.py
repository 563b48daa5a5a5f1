"""Gradients hold for every order of passes: graphs in flight, retained, checkpointed, second derivatives.

Gradients hold if they equal those of the same model without memplug.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memplug.tokenwise.plan.decisions import Setting
from tests.support.blocks import (
    Layer,
    Stack,
    alphas,
    assert_clean,
    assert_same,
    gradients,
    no_garbage_collection,
    tokenwise,
    twin,
)
from tests.support.simulated import adversarial_device

pytestmark = pytest.mark.device


@alphas
def test_no_grad_passes_capture_nothing(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    x = torch.randn(2, 6, 16)
    loss = model(x)
    frames, moved = executor.flow.forwards, executor.transfer.offloaded_total_bytes
    with torch.no_grad():
        assert torch.equal(model(x * 2), reference(x * 2))
    model.eval()
    with torch.inference_mode():
        assert torch.equal(model(x * 3), reference(x * 3))
    model.train()
    assert (executor.flow.forwards, executor.transfer.offloaded_total_bytes) == (frames, moved)
    loss.backward()
    reference(x).backward()
    assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
    del loss
    assert_clean(executor)


@alphas
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]], ids=str)
def test_graphs_in_flight_may_run_backward_in_any_order(alpha: float, order: list[int]) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    data = torch.randn(4, 2, 6, 16)
    with no_garbage_collection():
        losses, expected = [model(x) for x in data], [reference(x) for x in data]
        assert executor.flow.live == 12
        for index in order:
            losses[index].backward()
            expected[index].backward()
        losses.clear()
        assert_clean(executor)
    assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))


@alphas
def test_gradients_hold_in_a_one_forward_one_backward_schedule(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha, late := adversarial_device("late"))
    data = torch.randn(6, 2, 6, 16)
    for network, device in ((model, late), (reference, contextlib.nullcontext())):
        with device:
            window = [network(data[0]), network(data[1])]
            for x in data[2:]:
                window.append(network(x))
                window.pop(0).backward()
            for loss in window:
                loss.backward()
            del window, loss
    assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
    assert_clean(executor)


@alphas
def test_second_backward_through_a_retained_graph_gives_equal_gradients(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    x = torch.randn(2, 6, 16)
    reference(x).backward()
    expected = gradients(reference)
    loss = model(x)
    for keep in (True, True, False):
        loss.backward(retain_graph=keep)
        assert_same(gradients(model), expected, exact=alpha in (0, 1))
    del loss
    assert_clean(executor)


@alphas
def test_gradients_hold_for_a_subset_of_parameters(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    x = torch.randn(2, 6, 16)

    def some(network: nn.Module) -> list[torch.Tensor]:
        return [network.layers[2].up.weight, network.layers[1].qkv.weight, network.layers[1].norm1.bias]

    loss, expected = model(x), torch.autograd.grad(reference(x), some(reference))
    for keep in (True, False):
        for measured, right in zip(torch.autograd.grad(loss, some(model), retain_graph=keep), expected, strict=True):
            torch.testing.assert_close(measured, right)
    del loss
    assert_clean(executor)


@alphas
def test_second_derivatives_equal_those_without_memplug(alpha: float) -> None:
    torch.manual_seed(0)

    class Smooth(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(torch.tanh(self.inner(x)).exp())

    model = Stack(2, Smooth).double()
    reference = twin(model)
    executor = tokenwise(model, alpha)
    x = torch.randn(2, 6, 16, dtype=torch.double)
    for network in (model, reference):
        used = [p for layer in network.layers for p in (*layer.inner.parameters(), *layer.out.parameters())]
        first = torch.autograd.grad(network(x), used, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        del first
    assert_same(gradients(model), gradients(reference), exact=False)
    assert_clean(executor)


@alphas
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_hold_inside_a_checkpoint(alpha: float, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Stack(4)
    reference = twin(model)
    executor = tokenwise(model, alpha)

    def run(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for begin in (0, 2):
            x = checkpoint(
                lambda x, layers=network.layers[begin : begin + 2]: layers[1](layers[0](x).sin()),
                x,
                use_reentrant=reentrant,
            )
        return x.square().mean()

    for data in torch.randn(2, 2, 6, 16):
        for network in (model, reference):
            run(network, data.clone().requires_grad_()).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
    assert_clean(executor)


def test_forward_keeps_the_plan_that_it_began_with() -> None:
    class Replans(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            for region in model.regions:
                region.set(Setting("captures nothing", plan={}))
            return x + self.out(y.sigmoid())

    model = Stack(2, Replans)
    executor = tokenwise(model, 1.0)
    moved = []
    for _ in range(2):
        before = executor.transfer.offloads
        model(torch.randn(2, 6, 16)).backward()
        moved.append(executor.transfer.offloads - before)
    assert moved == [2 + 1, 1], "the first layer's products and the second's input, then only that input"
