"""Function transforms and forward-mode differentiation, around an attached model and inside of its regions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

import memplug
from memplug.tokenwise.engine.core import core
from tests.support.asking import ASKING
from tests.support.blocks import Layer, Stack

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
ALPHAS = pytest.mark.parametrize("alpha", [0, 1, "auto"])


def attached(model: nn.Module, alpha: float | str = 1) -> Any:
    tokenwise = {"regions": ["layers.*"], "alpha": alpha, "min_offload_bytes": 1}
    return memplug.attach(model, {"enabled": True, "plan_dir": False, "tokenwise": tokenwise})


class Plain(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.inner(x).tanh())


def gradient(model: nn.Module, x: torch.Tensor) -> Any:
    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,))

    return torch.func.grad(loss)(dict(model.named_parameters()), x)


def for_each_sample(model: nn.Module, x: torch.Tensor) -> Any:
    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x[None],))

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), x)


def with_tangents(model: nn.Module, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos())))


def batched_backward(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.autograd.functional.jacobian(lambda y: model(y).expand(3) * torch.arange(3.0), x, vectorize=True)


AROUND: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": gradient,
    "per-sample gradients": for_each_sample,
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x.cos(),)),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones(())),
    "vmap": lambda model, x: torch.func.vmap(model)(x[:, None]),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "hessian": lambda model, x: torch.func.hessian(model)(x[:1, :1]),
    "dual numbers": with_tangents,
    "jacobian": lambda model, x: torch.autograd.functional.jacobian(model, x),
    "batched backward": batched_backward,
    "Hessian of autograd": lambda model, x: torch.autograd.functional.hessian(model, x[:1, :1]),
    "functional_call": lambda model, x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
}


def leaves(found: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(found)


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("opaque", [False, True])
def test_function_transform_of_an_attached_model_gives_the_plain_result(name: str, opaque: bool) -> None:
    torch.manual_seed(0)
    model, x = Stack(2, Plain), torch.randn(2, 3, 16)
    right = leaves(AROUND[name](model, x))
    with attached(model) as session:
        for region in session._attached.regions if opaque else ():
            region.opaque = "for this test"
        for _ in range(2):
            found = leaves(AROUND[name](model, x))
            assert len(found) == len(right) and all(map(torch.equal, found, right))


def by_vmap(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(layer.inner)(x)


def by_vmap_with_dropout(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda y: nn.functional.dropout(layer.inner(y), 0.5), randomness="different")(x)


def by_jvp(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(layer.inner, (x,), (x.cos(),))[1]


def by_linearize(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.func.linearize(layer.inner, x)[1](x.cos())


def by_functionalize(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functionalize(lambda y: layer.inner(y).clone().mul_(2.0))(x)


def by_dual_numbers(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(layer.inner(forward_ad.make_dual(x.sin(), x.cos())).tanh())
        return value * tangent


def calling(inside: Callable[[Layer, torch.Tensor], torch.Tensor]) -> type[Layer]:
    class Calls(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(inside(self, x).tanh())

    return Calls


def losses_and_gradients(model: nn.Module, steps: int) -> Iterator[torch.Tensor]:
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(2, 6, 16))
        loss.backward()
        yield loss.detach()
        yield from (parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad)
        model.zero_grad()


def train_alike(block: type[Layer], alpha: float | str) -> Any:
    """Train with memplug and without, compare to the bit, and return the session."""
    torch.manual_seed(0)
    model = Stack(2, block)
    reference = copy.deepcopy(model)
    with attached(model, alpha) as session:
        found = list(losses_and_gradients(model, 5))
    right = list(losses_and_gradients(reference, 5))
    assert len(found) == len(right) and all(map(torch.equal, found, right))
    return session


@ALPHAS
@pytest.mark.parametrize(
    "inside", [by_vmap, by_vmap_with_dropout, by_jvp, by_linearize, by_functionalize, by_dual_numbers]
)
def test_transform_inside_a_region_makes_it_opaque(inside: Callable[..., torch.Tensor], alpha: float | str) -> None:
    session = train_alike(calling(inside), alpha)
    assert list(session._attached.executor.opaque) == [
        "a function transform or forward-mode differentiation inside of it"
    ]


@ALPHAS
@pytest.mark.parametrize("block", ASKING)
def test_layer_that_computes_gradients_trains_as_without_memplug(block: type[Layer], alpha: float | str) -> None:
    train_alike(block, alpha)


def test_torch_error_about_transforms_carries_memplug_advice() -> None:
    def inside(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: layer.inner(y).sin().sum())(x) @ x.new_ones(16, 32)

    model = Stack(1, calling(inside))
    with attached(model), pytest.raises(RuntimeError, match="don't yet support saved tensor hooks") as raised:
        model(torch.randn(2, 6, 16))
    assert "torch.autograd.grad" in raised.value.__notes__[0]


@pytest.mark.parametrize("opaque", [False, True])
def test_thread_without_transforms_gets_no_transform_stack(opaque: bool) -> None:
    # torch would copy the stack into every autograd node that this thread makes from then on
    found = []

    def train() -> None:
        model = Stack(2, Plain)
        with attached(model) as session:
            for region in session._attached.regions if opaque else ():
                region.opaque = "for this test"
            found.extend(losses_and_gradients(model, 2))
        found.append(core().has_transform_stack())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found[-1] is False
