"""Models and devices for tests of rounding buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.blocks import Block, Stack, twin
from tests.support.simulated import SimulatedDevice, WeakTensor

ENOUGH_BYTES = 1 << 20


class Watched(SimulatedDevice):
    """A device that records the memory that transfers request, and the destinations of copies."""

    def __init__(self, schedule: str = "late", room_bytes: int = 1 << 40):
        super().__init__(schedule)
        self.room_bytes = room_bytes
        self.made: list[tuple[int, int, WeakTensor]] = []  # address, bytes
        self.copied_to: list[int] = []

    def empty(self, *args: Any) -> torch.Tensor:
        found = super().empty(*args)
        if found.nbytes > self.room_bytes:
            raise torch.OutOfMemoryError("no room")
        self.made.append((found.data_ptr(), found.nbytes, WeakTensor(found)))
        return found

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.copied_to.append(destination.data_ptr())
        super().copy(stream, destination, source)

    def buffers_used(self) -> list[int]:
        """Return the numbers of the buffers that copies went into, in order; buffers are the first two allocations."""
        first = [(begin, begin + nbytes) for begin, nbytes, _ in self.made[:2]]
        numbers = [n for at in self.copied_to for n, (begin, end) in enumerate(first) if begin <= at < end]
        return [number for number, _ in itertools.groupby(numbers)]


class Keep(torch.autograd.Function):
    """A function whose backward passes its saved tensor to a callback."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, show: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.show = show
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.show(x)
        return gradient * x.cos(), None


class Shows(nn.Module):
    """A region whose backward shows a tensor that was swapped whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.keeps, self.shown = False, torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(Keep.apply(self.up(x), self.show))

    def show(self, x: torch.Tensor) -> None:
        if self.keeps:
            self.shown = x


def pair(layers: int = 6, block: Any = Block) -> tuple[Stack, Stack]:
    torch.manual_seed(0)
    model = Stack(layers, block)
    return model, twin(model)
