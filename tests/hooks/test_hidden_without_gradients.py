"""Custom autograd functions with kernels of their own, called without gradients inside of a region."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.blocks import Layer
from tests.support.hidden import Product, hidden
from tests.support.hidden_functions import Unsaid, train

pytestmark = pytest.mark.device

ALPHAS = [0.0, 1.0, "auto"]


class Scales(Layer):
    """A layer whose function writes to an operator's output, which backward reads."""

    mode = torch.no_grad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with self.mode():
            Unsaid.apply(y)
        return x + self.out(y * y.sigmoid())


class ScalesInInference(Scales):
    """Like `Scales`, but in inference mode, where no version counter sees the write."""

    mode = torch.inference_mode


class OperatorScales(Layer):
    """Like `ScalesInInference`, but an operator writes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.inference_mode():
            y.mul_(2.0)
        return x + self.out(y * y.sigmoid())


class ScalesInput(Layer):
    """A layer whose function writes to the region's input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            Unsaid.apply(x)
        return x + self.out(self.inner(x).sigmoid())


class Factor(Layer):
    """A layer that calls a function without gradients for a factor; with gradients the function saves its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.no_grad():
            factor = Product.apply(y, self.out.weight)
        return x + self.out(y.sigmoid()) * factor


class WithAndWithout(Layer):
    """A layer that calls the same function with and without gradients."""

    first: bool = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.set_grad_enabled(self.first):
            one = Product.apply(y, self.out.weight)
        with torch.set_grad_enabled(not self.first):
            other = Product.apply(y.sigmoid(), self.out.weight)
        return x + one * other.sin()


class WithThenWithout(WithAndWithout):
    """Like `WithAndWithout`, but in the other order."""

    first = True


class Around(torch.autograd.Function):
    """A function of visible operators that also calls a hidden function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return Unsaid.apply(x * 1.0).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * gradient * (1 - (2 * x).tanh().square())


class CallsAround(Layer):
    """A layer that uses `Around`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(Around.apply(self.inner(x)))


class CheckpointsAround(Layer):
    """Like `CallsAround`, but inside of torch's reentrant checkpoint, whose forward runs without gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(checkpoint(Around.apply, self.inner(x), use_reentrant=True))


class Inner(torch.autograd.Function):
    """A hidden function that saves its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with hidden():
            out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class CheckpointsHidden(Layer):
    """A layer whose only unit is `Inner`, inside of a reentrant checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(checkpoint(Inner.apply, self.inner(x), use_reentrant=True).sigmoid())


class ScalesInferenceTensor(Layer):
    """A layer that scales memory that has no version counter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.inference_mode():
            factor = y.detach() * 1.0
            Unsaid.apply(factor)
        return x + self.out(y.sigmoid() * factor.clone())


class Choose(torch.autograd.Function):
    """A router that chooses experts, and counts how often it chose each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        with hidden():
            chosen = x.topk(4, -1).indices
            counts.data.add_(torch.bincount(chosen.flatten(), minlength=32))
        return chosen

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[None, None]:
        return None, None


class ChoosesAndCounts(Layer):
    """A layer that uses `Choose` without gradients."""

    gradients = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.set_grad_enabled(self.gradients):
            chosen = Choose.apply(y, self.counts)
        return x + self.out(y.sigmoid() * torch.zeros_like(y).scatter(-1, chosen, 1.0))


class ChoosesAndCountsWithGradients(ChoosesAndCounts):
    """A layer that uses `Choose` with gradients."""

    gradients = True


class Average(torch.autograd.Function):
    """Updates an average of weights by operators, and sums the average, itself a parameter, by a hidden kernel."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
        average.mul_(0.9).add_(weight, alpha=0.1)
        with hidden():
            return average.sum() * 1.0

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[None, None]:
        return None, None


class Averages(Layer):
    """A layer that uses `Average`."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(16, 32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.no_grad():
            total = Average.apply(self.out.weight, self.average)
        return x + self.out(y.sigmoid()) + nn.functional.linear(y, self.average.clone()) * total


class ByState(torch.autograd.Function):
    """A function that reads and then updates state that is not among its arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, holder: Any) -> torch.Tensor:
        with hidden():
            out = x * holder.state
            holder.state.data.mul_(0.5).add_(1.0)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class ScalesByState(Layer):
    """A layer that uses `ByState`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.no_grad():
            factor = ByState.apply(y, self)
        return x + self.out(y.sigmoid() * factor)


UNITS = [
    Scales,
    ScalesInInference,
    OperatorScales,
    ScalesInput,
    Factor,
    WithAndWithout,
    WithThenWithout,
    CallsAround,
    CheckpointsAround,
    CheckpointsHidden,
    ScalesInferenceTensor,
    Averages,
    ScalesByState,
]


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("layer", UNITS)
def test_hidden_function_called_without_gradients_makes_no_region_opaque(
    layer: type[nn.Module], alpha: float | str
) -> None:
    assert train(layer, alpha=alpha)["opaque_regions"] == 0


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("layer", [ChoosesAndCounts, ChoosesAndCountsWithGradients])
def test_router_that_also_counts_its_choices_makes_its_region_opaque(
    layer: type[nn.Module], alpha: float | str
) -> None:
    assert train(layer, alpha=alpha)["opaque_regions"] == 3
