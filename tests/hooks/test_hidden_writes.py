"""Custom autograd functions that write to what they are given, past operators: their regions are opaque."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from memplug.errors import InPlaceError
from tests.support.blocks import Layer
from tests.support.hidden_functions import train


class InPlace(torch.autograd.Function):
    """Writes to what it is given, past the dispatcher, and says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.detach().numpy()[...] *= 2
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class WritesInPlace(Layer):
    """Its function does, to memory that an operator has made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(InPlace.apply(self.inner(x)).sigmoid())


class WritesInUnit(torch.autograd.Function):
    """Both: memory of its own, and its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(x)
        out.detach().numpy()[...] = 3 * x.detach().numpy()
        x.detach().numpy()[...] *= 2
        ctx.mark_dirty(x)
        return x, out

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return 2 * first + 3 * second


class WritesBoth(Layer):
    """Uses it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = WritesInUnit.apply(self.inner(x) * 1.0)
        return x + self.out(y.sigmoid() * z.tanh())


class WritesUnsaid(torch.autograd.Function):
    """Has its kernel write to what it is given, by an address, and tells nobody, as Liger's rotary embedding does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()  # which it is
        memory = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
        numpy.ctypeslib.as_array(memory)[...] *= 2
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class WritesByAddress(Layer):
    """Uses it, and what it gives twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = WritesUnsaid.apply(self.inner(x))
        return x + self.out(y * y.sigmoid())


UNSAID = [(WritesByAddress, alpha) for alpha in (0.0, 1.0, "auto")]


@pytest.mark.parametrize(("layer", "alpha"), [(WritesInPlace, 0.0), (WritesBoth, 0.0), (WritesBoth, 1.0), *UNSAID])
def test_a_function_that_writes_to_its_argument_past_operators_makes_the_region_opaque(
    layer: type[nn.Module], alpha: float | str
) -> None:
    assert train(layer, alpha=alpha)["opaque_regions"] > 0


def test_a_function_that_writes_past_operators_to_what_is_on_its_way_to_the_host_is_an_error() -> None:
    with pytest.raises(InPlaceError, match="before its copy to the host was done"):
        train(WritesInPlace, alpha=1.0)
