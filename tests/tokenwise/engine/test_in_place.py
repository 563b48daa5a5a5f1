"""Writing in place around a region gives correct gradients, or an error where torch gives one."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memplug.errors import InPlaceError
from tests.support.blocks import Stack, alphas, assert_clean, assert_same, functional, tokenwise, twin
from tests.support.forwards import WritesInput
from tests.support.simulated import adversarial_device

pytestmark = pytest.mark.device

# whether tensors are too small to be offloaded; how many forwards follow the write (during three forwards, memplug
# releases offloaded tensors)
SMALL_AND_MORE = [(False, 0), (False, 3), (True, 0)]
WRITES = {
    "add_": lambda y: y.add_(1),
    "slice": lambda y: y[:2].mul_(2),
    "transposed": lambda y: y.t().add_(1),
    "no_grad": lambda y: _under_no_grad(y),
}


def _under_no_grad(y: torch.Tensor) -> None:
    with torch.no_grad():
        y.add_(1)


@pytest.mark.unordered
@alphas
@pytest.mark.parametrize(("small", "more"), SMALL_AND_MORE)
@pytest.mark.parametrize("write", WRITES)
def test_writing_to_a_region_output_is_harmless_or_raises(alpha: float, small: bool, write: str, more: int) -> None:
    """Write to a captured output that backward needs, possibly while it is being offloaded.

    torch itself refuses the write if it saved the output.
    """
    weight = torch.randn(8, 8, requires_grad=True, generator=torch.Generator().manual_seed(0))

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ weight
        return y, (y * 2).sigmoid()

    settings = {"min_offload_bytes": 1 << 30} if small else {}
    region, executor = functional(call, alpha, device := adversarial_device("late"), **settings)

    def train(run: Callable[..., Any]) -> dict[str, torch.Tensor]:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y, z = run(x * 1.0)
        WRITES[write](y)
        total = y.sin().sum() + z.sum()
        for _ in range(more):  # during these forwards an offloaded `y` would be released
            total = total + sum(part.sum() for part in run(x * 3.0))
        total.backward()
        gradient, weight.grad = weight.grad, None
        return {"x": x.grad, "weight": gradient}

    with device:
        expected = train(call)
        try:
            measured = train(region)
        except InPlaceError:
            weight.grad = None
        else:
            assert_same(measured, expected, exact=False)
            assert not device.violations
        with contextlib.suppress(UnboundLocalError):
            del measured
        gc.collect()
        assert_clean(executor)


@pytest.mark.unordered
@alphas
@pytest.mark.parametrize(("small", "more"), SMALL_AND_MORE)
def test_writing_to_an_input_after_its_region_is_harmless_or_raises(alpha: float, small: bool, more: int) -> None:
    weight = torch.randn(8, 8, requires_grad=True, generator=torch.Generator().manual_seed(0))

    def call(x: torch.Tensor) -> torch.Tensor:
        return (x * 2) @ weight  # autograd does not save x itself

    settings = {"min_offload_bytes": 1 << 30} if small else {}
    region, executor = functional(call, alpha, device := adversarial_device("late"), **settings)

    def train(run: Callable[..., Any]) -> dict[str, torch.Tensor]:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = x * 1.0
        total = run(y).sum()
        y.add_(1)
        for _ in range(more):
            total = total + run(x * 3.0).sum()
        (total + y.sum()).backward()
        gradient, weight.grad = weight.grad, None
        return {"x": x.grad, "weight": gradient}

    with device:
        expected = train(call)
        try:
            assert_same(train(region), expected, exact=False)
        except (InPlaceError, RuntimeError) as error:
            assert "in place" in str(error) or "inplace" in str(error)
            weight.grad = None
        gc.collect()
        assert_clean(executor)


@alphas
@pytest.mark.parametrize("small", [False, True])
def test_writing_to_a_saved_tensor_inside_its_region_raises_like_torch(alpha: float, small: bool) -> None:
    def operator_output(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = (x @ weight).sigmoid()  # sigmoid saves its output
        y.mul_(2)
        return y

    def operator_input(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.sin()  # sin saves its input
        y.add_(1)
        return y @ weight + z

    def buffer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:4] = x[:4]
        z = y.exp()
        z[0] = 0
        return z @ weight

    for call in (operator_output, operator_input, buffer):
        weight = torch.randn(8, 8, requires_grad=True)
        region, executor = functional(call, alpha, **({"min_offload_bytes": 1 << 30} if small else {}))
        x = torch.randn(8, 8, requires_grad=True)
        for run in (call, region):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                run(x * 1.0, weight).sum().backward()
        gc.collect()
        assert_clean(executor)


@alphas
@pytest.mark.parametrize("name", ["gate.weight", "norm1.weight"])
def test_writing_to_a_parameter_before_backward_raises_like_torch(alpha: float, name: str) -> None:
    model = Stack(2)
    reference = twin(model)
    tokenwise(model, alpha)
    for network in (reference, model):
        loss = network(torch.randn(2, 6, 16))
        with torch.no_grad():
            network.layers[0].get_parameter(name).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@alphas
def test_gradients_hold_if_a_frozen_region_writes_to_its_input(alpha: float) -> None:
    """In the recompute pass only the input requires gradients."""

    class Frozen(WritesInput):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)

    torch.manual_seed(0)
    for settings in ({}, {"min_offload_bytes": 1 << 30}):
        model = Stack(3, Frozen)
        reference = twin(model)
        executor = tokenwise(model, alpha, **settings)
        x, y = (torch.randn(2, 6, 16).requires_grad_() for _ in range(2))
        y.data.copy_(x)
        model(x).backward()
        reference(y).backward()
        assert_same({"x": x.grad}, {"x": y.grad}, exact=alpha in (0, 1))
        assert_clean(executor)
