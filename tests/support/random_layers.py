"""A grammar of layers: small steps of every kind, and a layer that runs some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.support import random_modes, random_state, random_tensors
from tests.support.random_state import State
from tests.support.random_tensors import WIDTH

Step = Callable[["Layer", torch.Tensor], torch.Tensor]


def _named(steps: Any) -> dict[str, Any]:
    return {step.__name__.strip("_").replace("_", " "): step for step in steps}


STEPS: dict[str, Step] = _named((*random_tensors.STEPS, *random_modes.STEPS, *random_state.STEPS))
OPAQUE = ("address", "raises", "reshapes", "wrapped")
"""Steps that make a region opaque."""
STATEFUL = {*_named(random_state.STEPS), "spectral", "accumulates", "vmapped writes"} - {
    *OPAQUE,
    "reads training",
    "drops",
    "fails",
}
"""Steps that act differently each time."""


def _adds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def _adds_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(y)


def _returns_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x


def _returns_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([x + y, x])[0].transpose(0, 1).transpose(0, 1)


def _returns_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y.sin()


ENDS = _named((_adds, _adds_in_place, _returns_input, _returns_view, _returns_product))
"""How a layer ends, given its input and the output of its steps."""


class Layer(nn.Module):
    """A layer that runs some steps.

    Args:
        steps: names of `STEPS`, and at most one of `ENDS`, by default "adds". A prefix says in which training steps a
            layer's step runs: "later ": from number `turn` on; "once ": in number `turn`; "sometimes ": it depends on
            values.

    Attributes:
        step: the number of the training step.
        turn: the number of the training step that the prefixes "later " and "once " refer to.
    """

    step, turn = 0, 1

    def __init__(self, steps: tuple[str, ...]):
        super().__init__()
        self.steps = steps
        self.linear, self.other, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.batch_norm, self.scale = nn.BatchNorm1d(4), nn.Parameter(torch.ones(WIDTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True) if self._runs("recurrent") else None
        self.spectral = spectral_norm(nn.Linear(WIDTH, WIDTH)) if self._runs("spectral") else None
        self.table = nn.Parameter(torch.randn(4, WIDTH)) if self._runs("sparse gradient") else None
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.state = 0, State()

    def _runs(self, name: str) -> bool:
        return any(step.endswith(name) for step in self.steps)

    def forward(self, x: torch.Tensor, use: Callable[[torch.Tensor, Any], torch.Tensor], given: Any) -> torch.Tensor:
        y = use(self.linear(x), given)
        end = ENDS["adds"]
        for name in self.steps:
            if name in ENDS:
                end = ENDS[name]
            elif step := self._chosen(name, y):
                y = step(self, y)
        return end(x, self.other(y))

    def _chosen(self, name: str, y: torch.Tensor) -> Step | None:
        when, _, rest = name.partition(" ")
        if when == "later":
            return STEPS[rest] if self.step >= self.turn else None
        if when == "once":
            return STEPS[rest] if self.step == self.turn else None
        if when == "sometimes":
            return STEPS[rest] if y.detach().mean().item() > 0 else None
        return STEPS[name]

    def __repr__(self) -> str:
        return f"Layer({', '.join(self.steps)})"
