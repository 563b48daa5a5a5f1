"""Trainings whose batches are of several kinds that take turns, with memplug and without."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import memplug
from memplug.session.table import Stage

LENGTHS = {"A": 16, "B": 24, "C": 8}
"""Sequence lengths of the kinds of batches."""

RANDOM = "random"


def kinds_of(pattern: str, seed: int = 0) -> Iterator[str]:
    """Yield the kinds of a training's batches: by the pattern over and over, or three kinds at random."""
    if pattern != RANDOM:
        yield from itertools.cycle(pattern)
    draw = random.Random(seed)
    while True:
        yield draw.choice("ABC")


class Tower(nn.Module):
    """Embeds tokens by operators of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        kinds = (nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.Sigmoid, nn.Mish, nn.Hardswish)
        self.parts = nn.Sequential(*(part for kind in kinds for part in (nn.Linear(32, 32), kind(), nn.LayerNorm(32))))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for part in self.parts:
            x = x + part(x)
        return x


class Tail(nn.Module):
    """Makes large outputs outside of all regions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 1500), nn.Linear(1500, 1500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).exp().clamp(max=3)
        return (self.second(y).tanh() * y).sigmoid()


def model(has_tail: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True) for _ in range(3)]
    return nn.Sequential(Tower(), *layers, *([Tail()] if has_tail else []))


@dataclass
class Turns:
    """The results of a training.

    Attributes:
        losses: the loss of each step.
        weights: the parameters in the end.
        served: for each kind, in each of its own steps, the share of requests that the arena served.
        planned: for each kind, whether its own steps ran under a plan.
        report: the session's report.
    """

    losses: list[float] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    served: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    planned: dict[str, list[bool]] = field(default_factory=lambda: collections.defaultdict(list))
    report: dict[str, Any] = field(default_factory=dict)

    def equals(self, other: Turns) -> bool:
        """Return whether losses and weights are equal to the bit."""
        return self.losses == other.losses and all(map(torch.equal, self.weights, other.weights))


def train(pattern: str, steps: int, block: dict[str, Any], frozen: str = "", has_tail: bool = False) -> Turns:
    """Train for some steps.

    Args:
        pattern: the kinds of batches, see `kinds_of`.
        steps: number of steps.
        block: the "memplug" block, besides "enabled", "plan_dir" and the regions.
        frozen: kinds in whose steps the tower is frozen; then all batches have the length of kind "A".
        has_tail: whether the model has large outputs outside of all regions.
    """
    trained, found = model(has_tail), Turns()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    tokenwise = {"regions": ["[1-3]"], "min_offload_bytes": 256, **block.get("tokenwise", {})}
    batches = torch.Generator("cpu").manual_seed(1)
    with memplug.attach(trained, {"enabled": True, "plan_dir": False, **block, "tokenwise": tokenwise}) as session:
        boundary = session._attached.boundary if session.stage is not Stage.OFF else None
        for kind in itertools.islice(kinds_of(pattern), steps):
            trained[0].requires_grad_(kind not in frozen)
            length = LENGTHS["A" if frozen else kind]
            tokens = torch.randint(64, (2, length), generator=batches, device="cpu")
            loss = trained(tokens.to(trained[0].embedding.weight.device)).square().mean()
            is_planned = boundary is not None and boundary.adjuster.decisions is not None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            found.losses.append(loss.item())
            found.planned[kind].append(is_planned)
            arena = boundary.followers.find("arena") if boundary is not None else None
            if arena is not None:
                asked = arena.step.from_arena + arena.step.fallback
                found.served[kind].append(arena.step.from_arena / asked if asked else 0.0)
        found.report = session.report().as_dict()
    found.weights = [parameter.detach().clone() for parameter in trained.parameters()]
    return found
