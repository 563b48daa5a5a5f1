"""Layers and functions that launch collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported before any group exists, since its defaults hold the group at import

from tests.support.blocks import Layer
from tests.support.native_forward import Keeps


class _Filled(torch.autograd.Function):
    """Fills new memory, or memory that is there already, by a collective."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: Any, memory: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty_like(x) if memory is None else memory
        collective(out, x.contiguous())
        return out.clone() if memory is not None else out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


def filling(collective: Any, memory: torch.Tensor | None = None) -> type[Layer]:
    """Return a class of layers whose tokens go through a collective."""

    class Fills(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = _Filled.apply(self.norm(x), collective, memory)
            return x + self.out(self.inner(y).tanh())

    return Fills


@torch.library.custom_op("memplug_tests::exchange", mutates_args=())
def _exchange(x: torch.Tensor) -> torch.Tensor:
    """Run a collective inside one operator, as DeepSpeed's Ulysses attention for Hugging Face models does."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


_exchange.register_autograd(lambda ctx, gradient: gradient)


class Exchanges(Layer):
    """A layer that exchanges twice: backward needs the first result, but not the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _exchange(self.norm(x))
        return x + _exchange(self.out(self.inner(y).tanh()))


functional = torch.ops._c10d_functional
Collective = Callable[[torch.Tensor, Any], torch.Tensor]


def in_place(y: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(y, group=group)
    return y


COLLECTIVES: dict[str, Collective] = {
    "of c10d": in_place,
    "functional, by the group's name": lambda y, group: functional.wait_tensor(
        functional.all_reduce(y, "sum", group.group_name)
    ),
    "functional, by the group": lambda y, group: functional.wait_tensor(functional.all_reduce(y, "sum", group)),
}


def saving(collective: Collective, group: Any) -> torch.Tensor:
    """Run a collective whose result backward needs, but not its input."""
    y = collective(torch.full((4,), 3.0), group)
    return Keeps.apply(torch.ones(4, requires_grad=True), y * 2)
