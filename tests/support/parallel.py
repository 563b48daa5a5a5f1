"""A layer whose forward exchanges with other ranks, by torch's functional collectives."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.blocks import Layer


class Launches(TorchDispatchMode):
    """Counts collectives that reach the process group, of those that `counted` says."""

    def __init__(self, counted: Callable[[Any], bool]) -> None:
        super().__init__()
        self.counted = counted
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.counted(func):
            self.calls[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


class Reduce(torch.autograd.Function):
    """Tensor-parallel exit: reduce in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return functional_collectives.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Gather(torch.autograd.Function):
    """Sequence-parallel entry, in a world of one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return functional_collectives.all_gather_tensor(x.contiguous(), 0, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Parallel(Layer):
    """A tensor-parallel MLP: one collective whose result backward needs, and one at the end whose result it does
    not.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = Gather.apply(self.norm(x), dist.group.WORLD)
        return x + Reduce.apply(self.out(self.inner(gathered).sigmoid()), dist.group.WORLD)
