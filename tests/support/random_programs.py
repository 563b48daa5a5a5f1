"""Random programs: layers of a grammar, their arguments, how they are trained, and the results."""

from __future__ import annotations

import contextlib
import dataclasses
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
from tests.support import random_state
from tests.support.python_state import described
from tests.support.random_layers import ENDS, OPAQUE, STATEFUL, STEPS, Layer
from tests.support.random_modes import DispatchMode, FunctionMode
from tests.support.random_schedules import SCHEDULES
from tests.support.random_tensors import WIDTH, Named
from tests.support.with_and_without import block

SHAPE = (2, 4, WIDTH)


@dataclass(frozen=True)
class Given:
    """A second argument of all layers: how the model's forward makes it, and how a layer uses it."""

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
    return torch.nested.nested_tensor_from_jagged(x.detach().flatten(0, 1), torch.tensor([0, 3, len(x.flatten(0, 1))]))


GIVEN: dict[str, Given] = {
    "nothing": Given(lambda x: None, lambda y, _: y),
    "number": Given(lambda x: 1.5, _multiplied),
    "tensor": Given(lambda x: x.detach().cos(), _multiplied),
    "same tensor": Given(lambda x: x, _multiplied),
    "view": Given(lambda x: x.transpose(0, 1), lambda y, other: y + other.transpose(0, 1).sin()),
    "leaf": Given(lambda x: torch.ones(WIDTH, requires_grad=True), _multiplied),
    "with gradient": Given(lambda x: x.cos(), _multiplied),
    "transposed": Given(lambda x: x.detach().transpose(0, 2), lambda y, other: y * other.transpose(0, 2)),
    "expanded": Given(lambda x: torch.rand(WIDTH).expand(x.shape), _multiplied),
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
        lambda x: torch.eye(WIDTH).to_sparse(), lambda y, other: (other @ y.flatten(0, 1).t()).t().view_as(y)
    ),
    "compressed argument": Given(
        lambda x: torch.eye(WIDTH).to_sparse_csr(), lambda y, other: (other @ y.flatten(0, 1).t()).t().view_as(y)
    ),
    "nested argument": Given(_nested, lambda y, other: y * other.values().view_as(y)),
}


def _leaf(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x if x.requires_grad or x.grad_fn is not None else x.detach().requires_grad_()


ENTRIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scaled": lambda x, scale: x * scale,
    "without gradient": lambda x, scale: x * 1.0,
    "itself": lambda x, scale: x,
    "leaf": _leaf,
    "view": lambda x, scale: (x * scale).transpose(0, 1).contiguous().transpose(0, 1),
}
"""How the first layer's input is made from the batch and a weight."""


class Model(nn.Module):
    """Some layers in a row, all of which get the same argument."""

    def __init__(self, layers: tuple[tuple[str, ...], ...], given: str, entry: str):
        super().__init__()
        self.layers, self.given, self.entry = nn.ModuleList(map(Layer, layers)), GIVEN[given], ENTRIES[entry]
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x, self.scale)
        value = self.given.make(x)
        for layer in self.layers:
            x = layer(x, self.given.use, value)
        return x.square().mean()


def _freeze_one(model: Model) -> None:
    model.layers[0].linear.requires_grad_(False)


def _freeze_layer(model: Model) -> None:
    model.layers[0].requires_grad_(False)


def _tie(model: Model) -> None:
    for layer in model.layers:
        layer.other.weight = model.layers[0].linear.weight


KINDS: dict[str, Callable[[Model], Any]] = {
    "plain": lambda model: None,
    "partly frozen": _freeze_one,
    "frozen layer": _freeze_layer,
    "tied": _tie,
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "meta": lambda model: model.to("meta"),
}
"""Changes to a model before it trains."""


@contextlib.contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _saving_copies() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    # no cache, since a region casts a weight anew for each use, and gradients are compared to the bit
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "deterministic": _deterministic,
    "saved on cpu": lambda: torch.autograd.graph.save_on_cpu(),
    "without hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "default device": lambda: torch.device("cpu"),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
}


@dataclass(frozen=True)
class Program:
    """A random training.

    Attributes:
        layers: for each layer, the names of its steps.
        given: a name of `GIVEN`.
        modes: names of `MODES`, the outermost first.
        schedule: a name of `SCHEDULES` for each step.
        entry: a name of `ENTRIES`.
        kind: a name of `KINDS`.
        turn: see `Layer`.
        roomy: whether the budget lets a plan keep everything on the device.
        arena: whether the arena is enabled.
    """

    layers: tuple[tuple[str, ...], ...]
    given: str = "nothing"
    modes: tuple[str, ...] = ()
    schedule: tuple[str, ...] = ("plain",)
    entry: str = "without gradient"
    kind: str = "plain"
    turn: int = 1
    roomy: bool = False
    arena: bool = False

    def trained(self, alpha: float | str | None, copies: bool = False) -> Any:
        """Train, and return each step's losses, gradients and state, in a form for `==`, and the final error or None.

        Args:
            alpha: memplug's α; None to train without memplug.
            copies: make autograd save copies, so that a write to a saved tensor is no error and changes no gradient.
        """
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        random_state.begin()
        model, found = Model(self.layers, self.given, self.entry), []
        KINDS[self.kind](model)
        try:
            with _saving_copies() if copies else contextlib.nullcontext():
                self._train(model, alpha, found)
        except Exception as error:
            return found, error
        return found, None

    def _train(self, model: Model, alpha: float | str | None, found: list[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with self._session(model, alpha) as session:
            for step, name in enumerate(self.schedule):
                for layer in model.layers:
                    layer.step, layer.turn = step, self.turn
                losses = self._step(name, model)
                grads = [(n, described(p.grad)) for n, p in model.named_parameters()]
                found.append((name, described(losses), grads, described(model)))
                optimizer.step()
                optimizer.zero_grad()
                if session is not None:
                    session.step()

    def _session(self, model: Model, alpha: float | str | None) -> AbstractContextManager[Any]:
        if alpha is None:
            return contextlib.nullcontext()
        config = block(alpha, regions=["layers.*"])
        config |= {"profiler": {"wait_for_plans": True, "policy_steps": 2}, "arena": {"enabled": self.arena}}
        return memplug.attach(model, config | ({"device_budget_gib": 1} if self.roomy else {}))

    def _step(self, name: str, model: Model) -> list[torch.Tensor]:
        weight = model.scale
        with contextlib.ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(MODES[mode]())
            return SCHEDULES[name](model, torch.randn(SHAPE).to(weight.device, weight.dtype))


_STEPS = st.one_of(
    st.sampled_from(list(STEPS)),
    st.sampled_from(list(STEPS)),
    st.builds(" ".join, st.tuples(st.sampled_from(["later", "once", "sometimes"]), st.sampled_from(list(STEPS)))),
    st.builds(" ".join, st.tuples(st.sampled_from(["later", "once", "sometimes"]), st.sampled_from(OPAQUE))),
)


@st.composite
def _layers(draw: st.DrawFn) -> tuple[str, ...]:
    steps = draw(st.lists(_STEPS, max_size=4))
    if draw(st.booleans()):
        steps.insert(draw(st.integers(0, len(steps))), draw(st.sampled_from(OPAQUE)))
    return (*steps, *draw(st.one_of(st.just(()), st.sampled_from([(end,) for end in ENDS]))))


@st.composite
def _schedules(draw: st.DrawFn, most_steps: int) -> tuple[str, ...]:
    """Draw random steps, or one step repeated with a few others in between."""
    names = st.sampled_from(list(SCHEDULES))
    if draw(st.booleans()):
        return tuple(draw(st.lists(names, min_size=1, max_size=most_steps)))
    schedule = [draw(names)] * draw(st.integers(1, most_steps))
    for place, name in draw(st.dictionaries(st.integers(0, most_steps - 1), names, max_size=2)).items():
        if place < len(schedule):
            schedule[place] = name
    return tuple(schedule)


def _is_stateful(layers: tuple[tuple[str, ...], ...], given: str) -> bool:
    """Return whether torch's own checkpoint would rerun the layers from another state, and get wrong gradients."""
    words = {name for layer in layers for step in layer for name in (step, step.partition(" ")[2])}
    return not words.isdisjoint(STATEFUL) or given in ("list that grows", "written to")


@st.composite
def programs(draw: st.DrawFn, most_steps: int = 3) -> Program:
    """Draw programs of one to three layers; half of the layers have a step that makes them opaque."""
    program = draw(_programs(most_steps))
    if not _is_stateful(program.layers, program.given):
        return program
    schedule = ("plain" if "checkpointed" in name else name for name in program.schedule)
    return dataclasses.replace(program, schedule=tuple(schedule))


@st.composite
def _programs(draw: st.DrawFn, most_steps: int) -> Program:
    return Program(
        tuple(draw(st.lists(_layers(), min_size=1, max_size=3))),
        draw(st.sampled_from(list(GIVEN))),
        tuple(draw(st.lists(st.sampled_from(list(MODES)), max_size=2, unique=True))),
        draw(_schedules(most_steps)),
        draw(st.sampled_from(list(ENTRIES))),
        draw(st.one_of(st.just("plain"), st.sampled_from(list(KINDS)))),
        draw(st.integers(0, most_steps - 1)),
        draw(st.booleans()),
        draw(st.booleans()),
    )
