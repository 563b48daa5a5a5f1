"""A small training with a swap list, beside the same training without memplug."""

from __future__ import annotations

import gc
import random
from typing import Any

import torch
from torch import nn

import memplug
from tests.support.swapped import GIB, block

LAYERS, WIDTH, ROWS = 12, 32, 256
PEAK_BYTES = LAYERS * ROWS * WIDTH * 4 * 8 // 5
"""A budget of some two thirds of the memory that a step takes."""


class Deep(nn.Module):
    """Linear layers and activations; `noise` is the chance that extra operators run after a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.noise, self.fails = 0.0, False
        self.chance = random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = self.wander(layer(x))
            x = torch.nn.functional.gelu(x)
            if self.fails and index == LAYERS // 2:
                raise KeyError("in the middle")
        return x.square().mean()

    def wander(self, x: torch.Tensor) -> torch.Tensor:
        if self.chance.random() >= self.noise:
            return x
        kind = self.chance.randrange(3)
        if kind == 0:
            return x.clone()
        torch.empty(self.chance.randrange(1, 9999)).zero_()
        return x if kind == 1 else x + 0


def budget_gib(nbytes: int = PEAK_BYTES) -> float:
    """Return a budget of these bytes; on CUDA, add the bytes in use, since a budget there includes them."""
    gc.collect()
    there_bytes = torch.cuda.memory_allocated() if torch.get_default_device().type == "cuda" else 0
    return (there_bytes + nbytes) / GIB


class Training:
    """Trains with memplug and without, and compares the parameters after each step."""

    def __init__(self, asked_gib: float | None = None, kind: type[Deep] = Deep, **parts: Any):
        self.model, self.plain = kind(), kind()
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (self.model, self.plain)]
        self.session = memplug.attach(self.model, block(asked_gib or budget_gib(), **parts))
        self.steps = self.began = 0

    def inputs(self, rows: int = ROWS) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(self.steps)
        return torch.randn(rows, WIDTH, generator=generator, device="cpu").to(torch.get_default_device())

    def step(self, rows: int = ROWS) -> None:
        x = self.inputs(rows)
        for model, optimizer in zip((self.model, self.plain), self.optimizers, strict=True):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.end()

    def end(self) -> None:
        self.steps += 1
        self.session.step()
        for one, other in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(one, other)

    def until_it_swaps(self) -> None:
        while self.report["swap"] != "swapping":
            assert self.steps < 10
            self.step()
        self.began = self.steps

    def until_it_repeats(self) -> None:
        """Train until the swap list has followed a step: memplug then saw only its memory requests."""
        before = self.report["swap_repeated"]
        for _ in range(8):
            self.step()
        assert self.report["swap_repeated"] > before

    def away_bytes(self) -> int:
        swapper = self.session._attached.boundary.followers.find("swap")._in_force._swapper
        return swapper.host_bytes if swapper is not None else 0

    @property
    def report(self) -> dict[str, Any]:
        return self.session.report().as_dict()
