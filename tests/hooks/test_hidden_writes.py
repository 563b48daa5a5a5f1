"""Custom autograd functions whose own kernels write to their arguments.

From the second forward on, these functions are units that work in place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memplug.errors import InPlaceError
from tests.support.blocks import Layer
from tests.support.hidden import hidden
from tests.support.hidden_functions import Unsaid, train, written

pytestmark = pytest.mark.device


class InPlace(torch.autograd.Function):
    """A function that writes to its argument, and calls `mark_dirty`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        written(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class WritesInPlace(Layer):
    """A layer whose function writes to an operator's output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(InPlace.apply(self.inner(x)).sigmoid())


class WritesInUnit(torch.autograd.Function):
    """Like `InPlace`, but it also allocates memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with hidden():
            out = 3 * x
        written(x)
        ctx.mark_dirty(x)
        return x, out

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return 2 * first + 3 * second


class WritesBoth(Layer):
    """A layer that uses `WritesInUnit`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = WritesInUnit.apply(self.inner(x) * 1.0)
        return x + self.out(y.sigmoid() * z.tanh())


class WritesUnsaid(Layer):
    """A layer whose function writes without `mark_dirty`; the layer uses the result twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Unsaid.apply(self.inner(x))
        return x + self.out(y * y.sigmoid())


class WritesInput(Layer):
    """A layer whose function writes to the region's input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Unsaid.apply(x)
        return x + self.out(self.inner(x).sigmoid())


class WritesTwice(Layer):
    """A layer that writes twice to the same memory, with operators that read it before, between and after."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        before = y * 3.0
        y = Unsaid.apply(y)
        between = y + before
        return x + self.out(Unsaid.apply(y) * between.sigmoid())


class Rotary(torch.autograd.Function):
    """A rotary embedding like Liger's: it rotates queries and keys in the projections' outputs, viewed by heads."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        for each in (q, k):
            each.data_ptr()
            with hidden():
                each.data.mul_(cos)
        ctx.save_for_backward(cos)
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (cos,) = ctx.saved_tensors
        return *((gradient.transpose(1, 2) * cos).transpose(1, 2) for gradient in (q, k)), None


class Attends(Layer):
    """A layer that rotates queries in place; keys share memory with values, so the function rotates a copy of keys."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos = torch.linspace(0.5, 1.5, 4)
        q = self.inner(x).view(*x.shape[:2], -1, 4).transpose(1, 2)
        k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in self.inner(x).chunk(2, -1))
        q, k = Rotary.apply(q, k, cos)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        mixed = torch.softmax(q @ k.transpose(2, 3), -1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


UNSAID = [WritesUnsaid, WritesInput, WritesTwice, Attends]


@pytest.mark.parametrize("alpha", [0.0, 1.0, "auto"])
@pytest.mark.parametrize("layer", UNSAID)
def test_hidden_function_with_unmarked_writes_becomes_a_unit(layer: type[nn.Module], alpha: float | str) -> None:
    assert train(layer, alpha=alpha)["opaque_regions"] == 0


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("layer", [WritesInPlace, WritesBoth])
def test_hidden_function_that_calls_mark_dirty_becomes_a_unit(layer: type[nn.Module], alpha: float) -> None:
    assert train(layer, alpha=alpha)["opaque_regions"] == 0


def test_matmul_output_is_offloaded_before_a_unit_writes_to_it() -> None:
    assert train(WritesUnsaid, alpha=1.0)["ran"] == {"written": 3 + 3}, (
        "once in forward, once on the prefetched product"
    )


class AtTimes(torch.autograd.Function):
    """A function that writes to its argument if `writes` is set."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, writes: bool) -> torch.Tensor:
        with hidden():
            out = 3 * x
        if writes:
            torch.autograd.graph.increment_version(written(x))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 3 * gradient, None


class WritesAtTimes(Layer):
    """A layer whose function writes from the second step on."""

    takes_input = False

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.takes_input:
            return x + self.out(self.inner(AtTimes.apply(x, self.forwards > 2)).sigmoid())
        return x + self.out(AtTimes.apply(self.inner(x), self.forwards > 2).sigmoid())


class WritesInputAtTimes(WritesAtTimes):
    """Like `WritesAtTimes`, but the function writes to the region's input."""

    takes_input = True


def test_function_that_first_writes_in_a_later_step_makes_no_region_opaque() -> None:
    assert train(WritesAtTimes, alpha=0.0)["opaque_regions"] == 0


def test_function_that_first_writes_to_region_input_in_a_later_step_raises() -> None:
    with pytest.raises(InPlaceError, match="from outside of its region, which memplug cannot undo"):
        train(WritesInputAtTimes, alpha=0.0)
