"""A layer whose forward exchanges with other ranks, by torch's functional collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives

from tests.support.blocks import Layer


class Reduce(torch.autograd.Function):
    """A tensor-parallel exit: reduces in forward, and does nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return functional_collectives.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Gather(torch.autograd.Function):
    """A sequence-parallel entry, in a group of one rank: gathers in forward, and does nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return functional_collectives.all_gather_tensor(x.contiguous(), 0, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Parallel(Layer):
    """A tensor-parallel MLP with two collectives; backward needs only the result of the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = Gather.apply(self.norm(x), dist.group.WORLD)
        return x + Reduce.apply(self.out(self.inner(gathered).sigmoid()), dist.group.WORLD)
