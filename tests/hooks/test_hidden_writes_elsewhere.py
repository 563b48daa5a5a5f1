"""Custom autograd functions whose kernels write to memory that others use: buffers, or tensors of regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memplug.errors import InPlaceError
from memplug.tokenwise.engine.units import Unit
from tests.support.blocks import Layer, Stack, assert_same, gradients, tokenwise, twin
from tests.support.hidden import hidden, run_as_unit
from tests.support.hidden_functions import Pairs, Unsaid, over, train

pytestmark = pytest.mark.device

ALPHAS = [0.0, 1.0, "auto"]


class Statistic(torch.autograd.Function):
    """Scales by a running mean, and updates the mean in place: by operators, or by a kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, running: torch.Tensor, holder: Any, by_kernel: bool) -> Any:
        running = running if holder is None else holder.running
        with hidden():
            before = running.clone()
            out, updated = x * before, before * 0.5 + x.abs().mean()
        ctx.save_for_backward(before)
        if by_kernel:
            over(running, updated)
        else:
            running.mul_(0.5).add_(x.abs().mean())
        given = running.detach()
        ctx.mark_non_differentiable(given)
        return out, given

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, None, None, None]:
        (before,) = ctx.saved_tensors
        return gradient * before, None, None, None


class Updates(Layer):
    """A layer that passes its buffer to `Statistic`."""

    by_kernel, is_given, is_parameter = False, True, False

    def __init__(self) -> None:
        super().__init__()
        if self.is_parameter:
            self.running = nn.Parameter(torch.ones(1), requires_grad=False)
        else:
            self.register_buffer("running", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = (self.running, None) if self.is_given else (None, self)
        y, _ = Statistic.apply(self.inner(x), *given, self.by_kernel)
        return x + self.out(y.sigmoid())


class KernelUpdates(Updates):
    """Like `Updates`, but by a kernel."""

    by_kernel = True


class FindsBuffer(Updates):
    """A layer whose function finds the buffer in an object instead of its arguments."""

    is_given = False


class UpdatesParameter(Updates):
    """Like `Updates`, but updates a parameter."""

    is_parameter = True


class KernelUpdatesParameter(UpdatesParameter):
    """Like `UpdatesParameter`, but by a kernel."""

    by_kernel = True


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("layer", [Updates, KernelUpdates, FindsBuffer])
def test_function_writes_to_a_buffer_once_per_step(layer: type[nn.Module], alpha: float | str) -> None:
    train(layer, alpha=alpha)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_kernel_that_writes_to_a_parameter_raises(alpha: float | str) -> None:
    with pytest.raises(InPlaceError, match="from outside of its region, which memplug cannot undo"):
        train(KernelUpdatesParameter, alpha=alpha)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_function_writes_to_a_parameter_by_operators_once_per_step(alpha: float | str) -> None:
    train(UpdatesParameter, alpha=alpha)


class Makes(Layer):
    """A region with two outputs; its backward needs the second output unchanged."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.out(self.inner(x).sigmoid())
        return x + (y * 2.0).sigmoid(), y


class Writes(Layer):
    """A region that writes to another region's output."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.inner(Unsaid.apply(y)).sigmoid())


class Squashes(nn.Module):
    """A region that also returns its input; its backward needs the input, although autograd does not save it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2.0).sigmoid(), x


class WritesToMade(Pairs):
    """A region writes to another region's output."""

    first, second = Makes, Writes


class SharedInput(Pairs):
    """Two regions get the same tensor, and the second writes to it."""

    first, second = Squashes, Writes


class SharedByMany(nn.Module):
    """Several regions get the same tensor; when the last one writes to it, memplug has released the first regions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList([*(Squashes() for _ in range(5)), Writes()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        made = [layer(x)[0] for layer in self.layers[:-1]]
        return self.layers[-1](sum(made), x).square().mean()


@pytest.mark.parametrize("min_offload_bytes", [1, 1 << 20])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("network", [WritesToMade, SharedInput, SharedByMany])
def test_hidden_writes_do_not_corrupt_tensors_that_other_regions_need(
    network: type[nn.Module], alpha: float | str, min_offload_bytes: int
) -> None:
    train(network=network, alpha=alpha, min_offload_bytes=min_offload_bytes)


class Same(torch.autograd.Function):
    """A kernel that scales, or returns its argument if the factor is 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        if factor == 1:
            return x.view_as(x)
        with hidden():
            return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


class TwoCalls(Layer):
    """A layer that calls `Same` twice; the second call returns the region's input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Same.apply(self.inner(x), 0.5)
        return Same.apply(x, 1.0) + self.out(y.sigmoid())


class Fill(torch.autograd.Function):
    """A kernel that fills memory that an operator allocated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        with hidden():
            values = x.sin()
        ctx.save_for_backward(x)
        ctx.mark_dirty(over(out, values))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0].cos(), None


class Fills(Layer):
    """A layer that uses `Fill`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return x + self.out(Fill.apply(y, torch.empty_like(y)).sigmoid())


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("layer", [TwoCalls, Fills])
def test_returning_or_filling_an_argument_makes_no_region_opaque(layer: type[nn.Module], alpha: float | str) -> None:
    assert train(layer, alpha=alpha)["opaque_regions"] == 0


class Keeps(torch.autograd.Function):
    """A function that writes to both of its arguments, and returns one argument or neither.

    Its kernels stay unobserved, like those of an extension that takes addresses in C++.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, gives: bool) -> torch.Tensor:
        with hidden():
            x.data.mul_(2.0)
            y.data.copy_(x.data.sin())
            out = x.view_as(x) if gives else x * 1.0
        ctx.save_for_backward(y)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return 2 * gradient * ctx.saved_tensors[0].cos(), None, None


class KeepsOne(Layer):
    """A layer that applies `Keeps` to two operators' outputs; the function returns one of them."""

    gives = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        scratch = (y * 0.5).detach()
        y = Keeps.apply(y, scratch, self.gives)
        return x + self.out(y.sigmoid() * scratch)


class KeepsBoth(KeepsOne):
    """Like `KeepsOne`, but the function returns neither argument."""

    gives = False


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("layer", [KeepsOne, KeepsBoth])
def test_unmarked_writes_are_detected_in_the_first_call(layer: type[nn.Module], alpha: float | str) -> None:
    train(layer, alpha=alpha)


class Residual(nn.Module):
    """A norm that also returns its input, like Transformer Engine's fused operations."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return Normalized.apply(x)


class Normalized(torch.autograd.Function):
    """Normalizes the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with hidden():
            reciprocal = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
            out = x * reciprocal
        ctx.save_for_backward(out, reciprocal)
        return out, x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        out, reciprocal = ctx.saved_tensors
        return residual + reciprocal * (gradient - out * (gradient * out).mean(-1, keepdim=True))


class WithResidual(Layer):
    """A layer that uses `Residual`."""

    def __init__(self) -> None:
        super().__init__()
        self.residual = Residual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, x = self.residual(x)
        return x + self.out(self.inner(y).sigmoid())


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_unit_that_returns_its_input_does_not_count_as_writing_to_it(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3, WithResidual)
    reference, executor = twin(model), tokenwise(model, alpha)
    for layer in model.layers:
        run_as_unit(layer.residual, Unit(executor, "residual", None, is_row_wise=lambda state: True))
    for _ in range(3):
        x = torch.randn(2, 6, 16)
        for network in (model, reference):
            network(x).backward()
        assert_same(gradients(model), gradients(reference))
    assert not executor.opaque
