"""Layers whose forward changes Python state, and functions that make that state comparable."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support import shared_state
from tests.support.blocks import Layer

CALLS = 0
MEMPLUG = {"forward", "_memplug_region"}


def described(value: Any) -> Any:
    """Return a value in a form that `==` compares to the bit, with its attributes and items."""
    for cls, describe in _DESCRIBED.items():
        if isinstance(value, cls):
            return describe(value)
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return described(vars(value))
    return value


def _module(value: nn.Module) -> Any:
    own = {name: each for name, each in vars(value).items() if name not in MEMPLUG and "hooks" not in name}
    return type(value).__name__, described(own)


def _each(values: Any) -> list[Any]:
    return [described(value) for value in values]


def _values(tensor: torch.Tensor) -> Any:
    if tensor.is_meta:
        return tensor.shape, tensor.stride()
    return repr((tensor if tensor.layout is torch.strided else tensor.to_dense()).tolist())


_DESCRIBED: dict[Any, Callable[[Any], Any]] = {
    float: repr,  # as text, so that NaNs are equal too
    torch.Tensor: lambda value: (value.dtype, value.requires_grad, _values(value)),
    nn.Module: _module,
    dict: lambda value: [(key, described(each)) for key, each in value.items()],
    (list, tuple, collections.deque): _each,
    weakref.ref: lambda value: described(value()),
    np.ndarray: lambda value: value.tolist(),
    torch.Generator: lambda value: value.get_state().tolist(),
    random.Random: lambda value: value.getstate(),
    np.random.Generator: lambda value: value.bit_generator.state,
    itertools.count: repr,
    types.FunctionType: lambda value: _each(cell.cell_contents for cell in value.__closure__ or ()),
}


@dataclasses.dataclass
class Tracker:
    """An object of the model's own."""

    calls: int = 0
    means: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("last", "scale")

    def __init__(self) -> None:
        self.scale = 1.0


_DESCRIBED[Slotted] = lambda value: (value.scale, getattr(value, "last", None))


def counter() -> Callable[[], int]:
    """Return a function that counts its calls in a variable of its closure."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Stateful(Layer):
    """A layer that multiplies by the number or tensor that `moves` returns; `moves` also changes state.

    Attributes:
        opaque: whether the forward takes a tensor's address, which makes the region opaque.
    """

    opaque = True

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Create the initial state."""

    def moves(self, y: torch.Tensor) -> Any:
        """Return the factor of this forward; `y` has no graph."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.opaque:
            y.data_ptr()
        factor = self.moves(y.detach())
        return x + self.out((y * factor).sin())


class Buffer(Stateful):
    def begin(self) -> None:
        self.register_buffer("mean", torch.ones(32))

    def moves(self, y: torch.Tensor) -> Any:
        self.mean = 0.5 * self.mean + 0.5 * y.mean((0, 1))
        return self.mean


class ThenInPlace(Buffer):
    def moves(self, y: torch.Tensor) -> Any:
        self.mean.mul_(1.5)
        factor = super().moves(y).clone()
        self.mean.add_(1)
        return factor


class Data(Buffer):
    def moves(self, y: torch.Tensor) -> Any:
        self.mean.data = 0.5 * self.mean + y.mean((0, 1))
        return self.mean.clone()  # by the time of backward, self.mean itself would have the next forward's value


class DataOfInference(Data):
    """A buffer whose memory is made in inference mode, before the forward and in it."""

    def begin(self) -> None:
        super().begin()
        with torch.inference_mode():
            self.mean.data = torch.ones(32)

    def moves(self, y: torch.Tensor) -> Any:
        with torch.inference_mode():
            factor = super().moves(y)
        return factor.clone()


class Number(Stateful):
    def begin(self) -> None:
        self.step, self.scale = 0, 1.0

    def moves(self, y: torch.Tensor) -> Any:
        self.step += 1
        self.scale *= 1.25
        return self.step * self.scale


class History(Stateful):
    def begin(self) -> None:
        self.seen: list[Any] = []
        self.by_step: dict[int, torch.Tensor] = collections.OrderedDict()
        self.last: collections.deque[torch.Tensor] = collections.deque(maxlen=3)
        self.sizes: set[int] = set()

    def moves(self, y: torch.Tensor) -> Any:
        self.seen.append(y.mean((0, 1)))
        self.by_step[len(self.seen)] = self.seen[-1]
        self.last.appendleft(self.seen[-1])
        self.sizes.add(len(self.seen))
        return sum(self.last) + len(self.by_step) + len(self.sizes)


class Nested(Stateful):
    def begin(self) -> None:
        self.child = Number()
        self.table = {"tracker": Tracker(), "slotted": (Slotted(),)}

    def moves(self, y: torch.Tensor) -> Any:
        tracker, (slotted,) = self.table.values()
        tracker.calls += 1
        tracker.means.append(y.mean())
        slotted.scale = slotted.last = slotted.scale * 1.5
        return self.child.moves(y) + tracker.calls + sum(tracker.means) + slotted.scale


class Closure(Stateful):
    def begin(self) -> None:
        self.count = counter()

    def moves(self, y: torch.Tensor) -> Any:
        return self.count()


class OfClass(Stateful):
    calls = 0
    log: list[int] = []

    def begin(self) -> None:
        OfClass.calls = 0
        OfClass.log.clear()

    def moves(self, y: torch.Tensor, default: list[int] = []) -> Any:  # noqa: B006
        type(self).calls += 1
        self.log.append(self.calls)
        return self.calls + len(self.log) + len(default)


class Shared:
    """A class of the model's own, without instances."""

    calls = 0


class OfGlobals(Stateful):
    """Counts in a class, in a Python module, and in a global that only an inner function names."""

    def begin(self) -> None:
        global CALLS
        CALLS = Shared.calls = shared_state.calls = 0

    def moves(self, y: torch.Tensor) -> Any:
        def count() -> int:
            global CALLS
            CALLS += 1
            return CALLS

        Shared.calls += 1
        shared_state.calls += 1
        return count() + Shared.calls + shared_state.calls


class OfBase(Stateful):
    """Counts in the class of an object that it has."""

    def begin(self) -> None:
        Shared.calls = 0
        self.shared = Shared()

    def moves(self, y: torch.Tensor) -> Any:
        type(self.shared).calls += 1
        return self.shared.calls


class Graph(Stateful):
    """Keeps a tensor with its graph for the next forward."""

    def begin(self) -> None:
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y.data_ptr()
        before, self.last = self.last, y
        return x + self.out((y * (1 if before is None else before.detach().mean())).sin())


class Draws(Stateful):
    """Draws from generators of its own, and from those of Python and NumPy."""

    def begin(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.load = np.zeros(2)

    def moves(self, y: torch.Tensor) -> Any:
        self.load += 1
        mask = torch.rand(32, generator=self.torch)
        return mask + self.python.random() + self.numpy.random() + random.random() + np.random.rand() + self.load.sum()


class Renames(Stateful):
    """Adds and removes attributes, and exchanges two modules."""

    def begin(self) -> None:
        self.old: float = 2.0
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("a", torch.ones(32))
        self.register_buffer("b", torch.ones(32))

    def moves(self, y: torch.Tensor) -> Any:
        factor = getattr(self, "old", 1.0)
        self.__dict__.pop("old", None)
        self.new = factor + getattr(self, "new", 0)
        self.one, self.other = self.other, self.one
        first = self._buffers.pop("a")
        self.register_buffer("a", first + 1)
        return self.one(y).detach() * factor + self.new + self.a


class Replaces(Stateful):
    """Gives itself another parameter."""

    def begin(self) -> None:
        self.scale = nn.Parameter(torch.ones(32))

    def moves(self, y: torch.Tensor) -> Any:
        self.scale = nn.Parameter(self.scale.detach() * 1.5)
        return self.scale


STATEFUL: list[type[Stateful]] = [
    *(
        Buffer,
        ThenInPlace,
        Data,
        DataOfInference,
        Number,
        History,
        Nested,
        Closure,
        OfClass,
        OfGlobals,
        OfBase,
        Graph,
        Draws,
        Renames,
        Replaces,
    )
]
