"""Programs at random: layers of a grammar, what they are given, how they are trained, and what that gives."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

import memplug
from tests.support.python_state import described
from tests.support.random_layers import OPAQUE, STEPS, WIDTH, Layer, Named
from tests.support.with_and_without import block

SHAPE = (2, 4, WIDTH)


@dataclass(frozen=True)
class Given:
    """What each layer is given besides its input: a value for each forward, and what the layer does with it."""

    make: Callable[[torch.Tensor], Any]
    use: Callable[[torch.Tensor, Any], torch.Tensor]


def _appended(y: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
    seen.append(y.detach())
    return y * len(seen)


def _multiplied(y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return y * other


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.detach().sin()


def _nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(x.detach().flatten(0, 1), torch.tensor([0, 3, 8]))


GIVEN: dict[str, Given] = {
    "nothing": Given(lambda x: None, lambda y, _: y),
    "number": Given(lambda x: 1.5, _multiplied),
    "tensor": Given(lambda x: x.detach().cos(), _multiplied),
    "same tensor": Given(lambda x: x, _multiplied),
    "view": Given(lambda x: x.transpose(0, 1), lambda y, other: y + other.transpose(0, 1).sin()),
    "leaf": Given(lambda x: torch.ones(WIDTH, requires_grad=True), _multiplied),
    "with gradient": Given(lambda x: x.cos(), _multiplied),
    "transposed": Given(lambda x: x.detach().transpose(0, 2), lambda y, other: y * other.transpose(0, 2)),
    "expanded": Given(lambda x: torch.rand(WIDTH).expand(SHAPE), _multiplied),
    "mask": Given(lambda x: x.detach() > 0, lambda y, mask: y.masked_fill(mask, 0.5)),
    "double": Given(lambda x: x.detach().double(), lambda y, other: y * other.float()),
    "complex": Given(lambda x: torch.complex(x, x).conj(), lambda y, other: y * (other * other).imag),
    "negative": Given(lambda x: torch._neg_view(x.detach() * 1), _multiplied),
    "quantized": Given(
        lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 3, torch.quint8), lambda y, other: y * other.dequantize()
    ),
    "float8": Given(lambda x: x.detach().to(torch.float8_e5m2), lambda y, other: y * other.to(y.dtype)),
    "meta": Given(lambda x: x.detach().to("meta"), lambda y, other: y * other.shape[0]),
    "subclass": Given(lambda x: x.detach().as_subclass(Named), lambda y, other: (y * other).as_subclass(torch.Tensor)),
    "inference tensor": Given(_inference, lambda y, other: y * other.clone()),
    "inference tensor saved": Given(_inference, _multiplied),
    "containers": Given(
        lambda x: {"a": [x.detach().cos(), (x.sin(), None)]}, lambda y, given: y * given["a"][0] + given["a"][1][0]
    ),
    "list that grows": Given(lambda x: [], _appended),
    "written to": Given(lambda x: x.detach().clone(), lambda y, other: y * other.mul_(2).clone()),
    "sparse argument": Given(
        lambda x: torch.eye(WIDTH).to_sparse(), lambda y, other: (other @ y.flatten(0, 1).t()).t().view(SHAPE)
    ),
    "compressed argument": Given(
        lambda x: torch.eye(WIDTH).to_sparse_csr(), lambda y, other: (other @ y.flatten(0, 1).t()).t().view(SHAPE)
    ),
    "nested argument": Given(_nested, lambda y, other: y * other.values().view(SHAPE)),
}


class Model(nn.Module):
    """Some layers in a row, all of which are given the same."""

    def __init__(self, layers: tuple[tuple[str, ...], ...], given: str):
        super().__init__()
        self.layers, self.given = nn.ModuleList(map(Layer, layers)), GIVEN[given]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        value = self.given.make(x)
        for layer in self.layers:
            x = layer(x, self.given.use, value)
        return x.square().mean()


def _plain(model: Model, x: torch.Tensor) -> list[torch.Tensor]:
    loss = model(x)
    loss.backward()
    return [loss]


def _micro_batches(model: Model, x: torch.Tensor) -> list[torch.Tensor]:
    losses = [model(x), model(x * 2)]
    for loss in losses:
        loss.backward()
    return losses


def _reversed(model: Model, x: torch.Tensor) -> list[torch.Tensor]:
    losses = [model(x), model(x * 2)]
    for loss in reversed(losses):
        loss.backward()
    return losses


def _twice(model: Model, x: torch.Tensor) -> list[torch.Tensor]:
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def _evaluated(model: Model, x: torch.Tensor) -> list[torch.Tensor]:
    loss = model(x)
    model.eval()
    with torch.no_grad():
        other = model(x * 2)
    loss.backward()
    model.train()
    return [loss, other]


def _inferred(model: Model, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        other = model(x * 2)
    return [*_plain(model, x), other]


def _dropped(model: Model, x: torch.Tensor) -> list[torch.Tensor]:
    return [model(x).detach(), *_plain(model, x * 2)]


SCHEDULES = {
    schedule.__name__[1:].replace("_", " "): schedule
    for schedule in (_plain, _micro_batches, _reversed, _twice, _evaluated, _inferred, _dropped)
}


@contextlib.contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    # regions cast a weight for each use of it
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "deterministic": _deterministic,
    "saved on cpu": lambda: torch.autograd.graph.save_on_cpu(),
}


@dataclass(frozen=True)
class Program:
    """A training.

    Attributes:
        layers: names of each layer's steps.
        given, mode: a name of `GIVEN`, of `MODES`.
        schedule: a name of `SCHEDULES` for each step.
    """

    layers: tuple[tuple[str, ...], ...]
    given: str
    mode: str
    schedule: tuple[str, ...]

    def trained(self, alpha: float | str | None) -> Any:
        """Returns what the training gives, for `==`: losses, gradients and state of each step, and the error that ended
        it; with memplug where `alpha` is one.
        """
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model, found = Model(self.layers, self.given), []
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        session: Any = contextlib.nullcontext()
        if alpha is not None:
            session = memplug.attach(model, block(alpha, regions=["layers.*"]))
        error: Exception | None = None
        with session:
            for name in self.schedule:
                try:
                    with MODES[self.mode]():
                        losses = SCHEDULES[name](model, torch.randn(SHAPE))
                except Exception as raised:
                    error = raised
                    break
                grads = [(n, described(p.grad)) for n, p in model.named_parameters()]
                found.append((name, described(losses), grads, described(model)))
                optimizer.step()
                optimizer.zero_grad()
                if alpha is not None:
                    session.step()
        return found, error


def _layer(opaque: bool) -> st.SearchStrategy[tuple[str, ...]]:
    steps = st.lists(st.sampled_from(list(STEPS)), max_size=4)
    if not opaque:
        return steps.map(tuple)
    return st.tuples(steps, st.sampled_from(OPAQUE), steps).map(lambda parts: (*parts[0], parts[1], *parts[2]))


@st.composite
def programs(draw: st.DrawFn, most_steps: int = 3) -> Program:
    """Programs of one to three layers; a half of them have an opaque one."""
    layers = draw(st.lists(st.booleans().flatmap(_layer), min_size=1, max_size=3))
    schedule = draw(st.lists(st.sampled_from(list(SCHEDULES)), min_size=1, max_size=most_steps))
    return Program(
        tuple(layers), draw(st.sampled_from(list(GIVEN))), draw(st.sampled_from(list(MODES))), tuple(schedule)
    )
