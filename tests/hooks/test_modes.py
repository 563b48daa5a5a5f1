"""An attached model trains inside modes of torch and of the script as without memplug."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import detect_anomaly, graph
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import memplug
from tests.support.blocks import assert_same, gradients
from tests.support.hosts import block, tiny_llama, tokens

pytestmark = pytest.mark.usefixtures("keeps_nothing")
alphas = pytest.mark.parametrize("alpha", [0, 1, "auto"])


class HandsOn(TorchDispatchMode):
    """Reads operators' outputs with further operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            out.detach().abs().sum()
        return out


class Scales(TorchDispatchMode):
    """Changes the values that a matmul returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.01 if func is torch.ops.aten.mm.default else out


class ScalesInPlace(TorchDispatchMode):
    """Writes to a matmul's output."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.mul_(1.01) if func is torch.ops.aten.mm.default else out


class GivesMore(TorchDispatchMode):
    """Calls a matmul with changed arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            args = (args[0] * 1.01, *args[1:])
        return func(*args, **(kwargs or {}))


class Both(contextlib.ExitStack):
    """A mode that changes no values, inside of a mode that does."""

    def __enter__(self) -> Any:
        super().__enter__()
        self.enter_context(Scales())
        return self.enter_context(HandsOn())


def on_cpu() -> Any:
    return graph.save_on_cpu()


def copies() -> Any:
    return graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)


def without_hooks() -> Any:
    return graph.disable_saved_tensors_hooks("none of these here")


MODES = [HandsOn, Scales, ScalesInPlace, GivesMore, Both, on_cpu, copies, without_hooks, detect_anomaly]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)


class ScalesFunctions(TorchFunctionMode):
    """Changes the values that a linear layer's function returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.01 if func is nn.functional.linear else out


class Addressed(nn.Sequential):
    """An opaque layer: it takes the address of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.data_ptr()
        return super().forward(x)


def step(model: nn.Module, seed: int, forward: Any, backward: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with forward:
        loss = model(input_ids=tokens(seed), labels=tokens(seed)).loss
    with backward:
        loss.backward()
    return loss.detach(), gradients(model)


@modes
@alphas
def test_training_inside_torch_modes_equals_plain_training(mode: Callable[[], Any], alpha: Any) -> None:
    def train(model: nn.Module) -> list[Any]:
        """Run steps without the mode, and with the mode around the whole step, its forward or its backward."""
        found, none = [], contextlib.nullcontext()
        for seed in range(2):
            found.append(step(model, seed, none, none))
            with mode():
                found.append(step(model, seed, none, none))
            found.append(step(model, seed, mode(), none))
            found.append(step(model, seed, none, mode()))
        return found

    expected, model = train(tiny_llama()), tiny_llama()
    with memplug.attach(model, block(alpha=alpha)) as session:
        for (loss, gradient), (other, others) in zip(train(model), expected, strict=True):
            assert torch.equal(loss, other)
            assert_same(gradient, others, exact=alpha != "auto")
        assert session._attached.executor.flow.live == 0


@pytest.mark.parametrize("alpha", [0, 1])
@pytest.mark.parametrize("mode", [HandsOn, Scales, ScalesFunctions])
def test_opaque_region_recomputes_in_the_torch_modes_of_its_forward(mode: Callable[[], Any], alpha: int) -> None:
    def train(model: nn.Module) -> list[torch.Tensor]:
        found, none = [], contextlib.nullcontext
        for step, (forward, backward) in enumerate([(none, none), (none, mode), (mode, none), (mode, mode)]):
            with forward():
                loss = model(torch.linspace(-1, 1 + step, 64).view(8, 8)).square().sum()
            with backward():
                loss.backward()
            found += [loss.detach(), *gradients(model).values()]
        return found

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Addressed(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)))

    expected, model = train(make()), make()
    with memplug.attach(model, block(alpha=alpha, regions=["[0-2]"])) as session:
        assert all(map(torch.equal, train(model), expected))
        assert session._attached.executor.opaque_regions == 3


@pytest.mark.parametrize(("mode", "opaque"), [(HandsOn, 0), (FlopCounterMode, 0), (Scales, 3)])
def test_regions_are_opaque_only_in_torch_modes_that_change_values(mode: Callable[..., Any], opaque: int) -> None:
    model = tiny_llama()
    with memplug.attach(model, block()) as session:
        for seed in range(2):
            with mode(**({"display": False} if mode is FlopCounterMode else {})):
                step(model, seed, contextlib.nullcontext(), contextlib.nullcontext())
        assert session._attached.executor.opaque_regions == opaque


@alphas
def test_forward_has_as_many_flops_as_without_memplug(alpha: Any) -> None:
    def count(model: nn.Module) -> list[int]:
        found = []
        for seed in range(2):
            with FlopCounterMode(display=False) as counter:
                loss = model(input_ids=tokens(seed), labels=tokens(seed)).loss
            found.append(counter.get_total_flops())
            loss.backward()
        return found

    expected, model = count(tiny_llama()), tiny_llama()
    with memplug.attach(model, block(alpha=alpha)):
        assert count(model) == expected


def test_step_after_a_fake_tensor_step_has_correct_gradients() -> None:
    model, plain = tiny_llama(), tiny_llama()
    with memplug.attach(model, block()) as session:
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.zeros(2, 12, dtype=torch.long)
            model(input_ids=x, labels=x).loss.backward()
        gradients(model)
        none = contextlib.nullcontext()
        assert_same(step(model, 0, none, none)[1], step(plain, 0, none, none)[1])
        assert session._attached.executor.opaque_regions == 0
