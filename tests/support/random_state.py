"""Steps of random layers that read and change Python state, and steps that make a region opaque."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.support import shared_state
from tests.support.python_state import Slotted, Tracker, counter

if TYPE_CHECKING:
    from tests.support.random_layers import Layer

SHARED = {"calls": 0}


class State:
    """The state of a layer outside of its module: counters, histories and generators that its steps use."""

    shared = 0

    def __init__(self) -> None:
        self.calls, self.history, self.tracker, self.slotted = 0, [], Tracker(), Slotted()
        self.counter, self.generator = counter(), torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.last: torch.Tensor | None = None
        self.by_size: dict[Any, torch.Tensor] = {}
        self.recent: collections.deque[torch.Tensor] = collections.deque(maxlen=2)
        self.load = np.zeros(2)


def begin() -> None:
    """Reset the state that all layers share."""
    SHARED["calls"] = State.shared = shared_state.calls = 0


def counts(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    layer.calls += 1
    return y * layer.calls


def counts_for_all(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    SHARED["calls"] += 1
    State.shared += 2
    shared_state.calls += 3
    return y * (SHARED["calls"] + State.shared + shared_state.calls)


def rebinds(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    layer.mean = 0.5 * layer.mean + y.detach().mean((0, 1))
    return y * layer.mean.clone()


def saves_what_moves(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    y = y * layer.mean
    with torch.no_grad():
        layer.mean.mul_(0.5)
    return y


def moves_in_place(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        layer.count += 1
        layer.mean.mul_(0.5).add_(y.mean((0, 1)))
    return y + layer.mean * layer.count


def sets_data(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    if torch._C._functorch.is_functorch_wrapped_tensor(y):
        return y  # a wrapped tensor's memory lasts no longer than the transform
    layer.mean.data = 0.5 * layer.mean + y.detach().mean((0, 1))
    return y * layer.mean.clone()


def renames(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    mean = layer._buffers.pop("mean")
    layer.register_buffer("mean", mean * 1.5)
    layer.linear, layer.other = layer.other, layer.linear
    return layer.linear(y) * layer.mean


def appends(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    layer.state.history.append(y.detach().mean())
    return y * sum(layer.state.history)


def tracks(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    state = layer.state
    state.tracker.calls += 1
    state.tracker.means.append(y.detach().mean())
    state.slotted.scale *= 1.5
    state.load += 1
    return y * len(state.tracker.means) * state.slotted.scale * state.load.sum()


def caches(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    if y.shape not in layer.state.by_size:
        layer.state.by_size[y.shape] = y.detach().cos()
    return y * layer.state.by_size[y.shape]


def remembers(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    layer.state.recent.appendleft(y.detach().sin())
    return y * sum(layer.state.recent)


def closes_over(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * layer.state.counter()


def keeps_graph(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    before, layer.state.last = layer.state.last, y
    return y if before is None else y * before.detach()


def reads_training(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y.sin() if layer.training else y.cos()


def iterates(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(layer.state, "numbers"):
        layer.state.numbers = itertools.count(1)
    return y * next(layer.state.numbers)


def draws(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * random.random() * np.random.rand() + torch.rand(y.shape[-1], generator=layer.state.generator)


def draws_of_its_own(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * layer.state.python.random() + layer.state.numpy.random()


def drops(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return F.dropout(y, 0.3, layer.training)


def skips(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return layer.other(y).sin() if random.random() < 0.5 else y


def replaces(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    layer.scale = nn.Parameter(layer.scale.detach() * 1.5)
    return y * layer.scale


# -- what makes a region opaque ----------------------------------------------------------------------------------------


def address(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    assert y.is_meta or y.data_ptr() or not y.numel()
    return y


def raises(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):
        y @ y[..., :3]
    return y


def reshapes(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * torch.zeros(1).set_(y.detach())


def fails(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y @ y


OPAQUE = (address, raises, reshapes)
STEPS = (
    *(counts, counts_for_all, rebinds, saves_what_moves, moves_in_place, sets_data, renames, appends, tracks, caches),
    *(remembers, closes_over, keeps_graph, reads_training, iterates, draws, draws_of_its_own, drops, skips, replaces),
    *(*OPAQUE, fails),
)
