"""When a module runs again, its arguments keep their classes, and share memory as in forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.blocks import Layer, Stack, alphas, assert_same, gradients, tokenwise, twin

pytestmark = pytest.mark.device


class Marked(torch.Tensor):
    """A tensor subclass without `__torch_dispatch__`."""


class Dispatches(torch.Tensor):
    """A tensor subclass that runs its operators in its own `__torch_dispatch__`."""

    own: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Dispatches:
        made = torch.Tensor._make_subclass(cls, tensor.detach())
        made.own = tensor.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map(
            lambda each: each.own if isinstance(each, cls) else each, (args, kwargs or {})
        )
        out = func(*plain[0], **plain[1])
        return cls.of(out) if func is torch.ops.aten.detach.default else out


class Looks(Layer):
    """A layer whose result depends on the class of its second argument, which shares memory with the first."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        factor = 3.0 if type(y) in (Marked, Dispatches) else 1.0
        return x + self.out((self.inner(x) * factor).sigmoid()) + torch.Tensor.mul(y, 1.0).as_subclass(torch.Tensor)


@alphas
@pytest.mark.parametrize(
    "second", [lambda x: x.detach().as_subclass(Marked), lambda x: x.as_subclass(Marked), Dispatches.of]
)
def test_argument_keeps_its_class_in_the_recompute_pass(
    alpha: float, second: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    torch.manual_seed(0)
    model = Stack(2, Looks)
    reference = twin(model)
    tokenwise(model, alpha)
    for region in model.regions:
        region.opaque = "for this test"
    x = torch.randn(2, 6, 16)
    for network in (model, reference):
        y = x * torch.nn.functional.normalize(network.layers[0].inner.bias[:16], dim=0)
        for layer in network.layers:
            y = layer(y, second(y))
        y.square().mean().backward()
    assert_same(gradients(model), gradients(reference))


class WritesSecond(Layer):
    """A layer that writes to the second of two arguments that share one memory."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.mul_(0.5)
        return self.out(self.inner(x).sigmoid()) + x.sin()


@alphas
@pytest.mark.parametrize("second", [lambda x: x, torch.Tensor.detach, lambda x: x.view(-1)[3:40]])
@pytest.mark.parametrize("how", ["opaque", "by its tape"])
def test_arguments_that_share_storage_still_do_in_the_recompute_pass(
    alpha: float, second: Callable[[torch.Tensor], torch.Tensor], how: str
) -> None:
    torch.manual_seed(0)
    model = Stack(2, WritesSecond)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for region in model.regions if how == "opaque" else ():
        region.opaque = "for this test"
    x = torch.randn(2, 6, 16)
    for network in (model, reference):
        y = x * torch.nn.functional.normalize(network.layers[0].inner.bias[:16], dim=0)
        for layer in network.layers:
            y = layer(y, second(y))
        y.square().mean().backward()
    assert_same(gradients(model), gradients(reference))
    assert executor.opaque_regions == (0 if how == "by its tape" else 2)
    if how == "opaque":
        assert executor.transfer.offloads == 2, "each input once"
