"""Inputs and outputs of regions: containers, views, and tensors that several regions share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.blocks import Layer, Stack, alphas, assert_clean, assert_same, functional, gradients, tokenwise, twin
from tests.support.simulated import adversarial_device

pytestmark = pytest.mark.device


class Structured(Layer):
    """A layer that takes and returns tensors in every container."""

    def forward(
        self, state: dict[str, Any], *, mask: torch.Tensor | None = None, scale: float = 1.0, extra: tuple = ()
    ) -> dict[str, Any]:
        y = self.inner(self.norm(state["x"])).sigmoid()
        if mask is not None:
            y = y * mask
        for tensor in extra:
            y = y + tensor
        return {
            "x": state["x"] + self.out(y) * scale,
            "nothing": None,
            "aux": (y.square().mean(), [y[0], 3]),
            "index": y.argmax(-1),
        }


@alphas
def test_gradients_hold_for_nested_arguments_and_outputs(alpha: float) -> None:
    torch.manual_seed(0)

    class Network(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state, loss = {"x": x * 1.0, "nothing": None}, 0
            mask = torch.rand(2, 6, 32) > 0.3
            for index, layer in enumerate(self.layers):
                extra = (state["aux"][1][0] * 2, torch.ones(32)) if index else ()
                state = layer(state, mask=mask if index % 2 else None, scale=0.5 + index, extra=extra)
                loss = loss + state["aux"][0] + state["aux"][1][0].sin().mean() + state["index"].sum() * 0
            return loss + state["x"].square().mean()

    model = Network(3, Structured)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for x in torch.randn(2, 2, 6, 16):
        for network in (model, reference):
            torch.manual_seed(1)
            network(x).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
    assert_clean(executor)


@alphas
def test_views_of_one_tensor_are_separate_inputs(alpha: float) -> None:
    """Neighbouring regions share an input's copy; a transposed view of the input has a copy of its own."""
    torch.manual_seed(0)
    weight = torch.randn(8, 8, requires_grad=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sigmoid() + x.exp().tanh()

    region, executor = functional(call, alpha)
    results = []
    for run in (region, call):
        x = torch.arange(64.0).view(8, 8).div(64).requires_grad_()
        y = x * 1.0
        (run(y) + 2 * run(y.t()) + run(y.view(-1).view(8, 8)) * run(y.t())).sum().backward()
        results.append({"x": x.grad, "weight": weight.grad})
        weight.grad = None
    assert_same(*results, exact=alpha in (0, 1))
    del y
    assert_clean(executor)


def test_memory_is_released_after_its_last_copy_in_any_input_order() -> None:
    """Let the second forward read an input that the first forward copied; then drop the first forward's graph."""

    def call(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return new.sigmoid() * old.tanh()

    region, executor = functional(call, 0.0, device := adversarial_device("late"))
    gradient = {}
    for run in (region, call):
        with device:
            x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
            old = x * 1.0
            dropped = run(old, old * 2.0)
            out = run(old * 3.0, old)
            del dropped
            more = [run(old * 4.0, old * 5.0) for _ in range(2)]
            (out.sum() + sum(part.sum() for part in more)).backward()
            gradient[run] = x.grad
            del out, more, old
    assert_same({"x": gradient[region]}, {"x": gradient[call]})
    assert_clean(executor)


@alphas
def test_region_may_return_any_view_of_a_captured_output(alpha: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 8, requires_grad=True)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ weight
        return y.t(), y[2:].view(-1), (y.sigmoid() * y)

    results = []
    region, executor = functional(call, alpha, device := adversarial_device("late"))
    with device:
        for run in (region, call):
            for data in torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)):
                x = data.requires_grad_()
                loss = sum(part.sin().sum() * (i + 1) for i, part in enumerate(run(x * 1.0)))
                loss.backward()
                results.append({"x": x.grad, "weight": weight.grad})
                weight.grad = None
                del loss
        assert_clean(executor)
    for measured, expected in zip(results[:2], results[2:], strict=True):
        assert_same(measured, expected, exact=alpha in (0, 1))


@alphas
def test_view_input_written_in_place_keeps_its_strides_and_offset(alpha: float) -> None:
    weight = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def call(view: torch.Tensor) -> torch.Tensor:
        y = ((view + 1) @ weight).sigmoid()
        flat = view.as_strided((3,), (7,), view.storage_offset())  # reaches beyond the view's rows
        view.mul_(0.5)
        return y * y * flat.sum()

    region, _ = functional(call, alpha)
    gradient = {}
    for run in (region, call):
        weight.grad = None
        view = (torch.arange(24.0) / 24).view(4, 6)[1:, 2:5].t()
        run(view).sum().backward()
        gradient[run] = weight.grad
    assert_same({"weight": gradient[region]}, {"weight": gradient[call]})


@alphas
def test_conjugate_view_of_captured_tensor_keeps_its_conjugation(alpha: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 8, dtype=torch.complex64, requires_grad=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        return y.conj() * x

    region, executor = functional(call, alpha)
    results = []
    for run in (region, call):
        x = torch.randn(8, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        run(x * 1.0).abs().sum().backward()
        results.append({"x": x.grad, "weight": weight.grad})
        weight.grad = None
    assert_same(*results, exact=alpha in (0, 1))
    assert_clean(executor)
