"""Layers that reduce in place over all ranks, by torch's functional collectives; their wait is an operator too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.support.blocks import Layer


class _Functional(torch.autograd.Function):
    """Reduces a matmul's own output by functional collectives: the whole, a part, or several parts one by one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: tuple[slice, ...], factor: float) -> torch.Tensor:
        for part in parts:
            reduced_in_place(x[part])
        y = x * factor
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return gradient * x.cos(), None, None


def reduced_in_place(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, in the memory of `x`."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce_(x, "sum", dist.group.WORLD.group_name))


def broadcast_in_place(x: torch.Tensor) -> torch.Tensor:
    """Return the first rank's values, in the memory of `x`."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.broadcast_(x, 0, dist.group.WORLD.group_name))


def reducing(*parts: slice, reads_before: bool = False) -> type[Layer]:
    """Return a class of layers that reduce rows of a matmul's output in place; backward needs the sums."""

    class InPlace(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(self.norm(x))
            before = y.detach().exp() if reads_before else 1.0
            return x + self.out(_Functional.apply(y, parts, 2.0) * before).sigmoid()

    return InPlace


WHOLE = slice(None)


class ReducesMemoryThatWasThere(Layer):
    """A layer that reduces a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x))
        reduced_in_place(self.scale)
        return x + self.out(y.sigmoid() * self.scale)
