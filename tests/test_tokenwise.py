"""Whatever a region's forward does, gradients are those of the model without memplug, or the error is loud."""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memplug.errors import InPlaceError, RecomputeError
from memplug.execute.device import Device
from tests.blocks import Block, Layer, Stack, assert_clean, assert_same, gradients, tokenwise, train_alike, twin
from tests.simulated import SimulatedDevice

ALPHAS = [0.0, 0.3, 1.0]
alphas = pytest.mark.parametrize("alpha", ALPHAS)


class Counter(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.partition("::")[2] if func.namespace == "aten" else func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """What is freed inside is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_tensors() -> int:
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


# -- what stays untouched ------------------------------------------------------------------------------------------------------------


@alphas
def test_passes_without_gradients_leave_no_trace(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    x = torch.randn(2, 6, 16)
    loss = model(x)
    frames, moved = executor.frames, executor.transfer.offloaded_total_bytes
    with torch.no_grad():
        assert torch.equal(model(x * 2), reference(x * 2))
    model.eval()
    with torch.inference_mode():
        assert torch.equal(model(x * 3), reference(x * 3))
    model.train()
    assert (executor.frames, executor.transfer.offloaded_total_bytes) == (frames, moved)
    loss.backward()
    reference(x).backward()
    assert_same(gradients(model), gradients(reference), exact=alpha != 0.3)
    del loss
    assert_clean(executor)


# -- graphs in flight ----------------------------------------------------------------------------------------------------------------


@alphas
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]], ids=str)
def test_graphs_alive_together_run_backward_in_any_order(alpha: float, order: list[int]) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    data = torch.randn(4, 2, 6, 16)
    with no_garbage_collection():
        losses, expected = [model(x) for x in data], [reference(x) for x in data]
        assert executor.live_frames == 12
        for index in order:
            losses[index].backward()
            expected[index].backward()
        losses.clear()
        assert_clean(executor)
    assert_same(gradients(model), gradients(reference), exact=alpha != 0.3)


@alphas
def test_one_forward_one_backward_keeps_its_graphs_apart(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha, RESIDENT := SimulatedDevice("late"))
    data = torch.randn(6, 2, 6, 16)
    for network, device in ((model, RESIDENT), (reference, contextlib.nullcontext())):
        with device:
            window = [network(data[0]), network(data[1])]
            for x in data[2:]:
                window.append(network(x))
                window.pop(0).backward()
            for loss in window:
                loss.backward()
            del window, loss
    assert_same(gradients(model), gradients(reference), exact=alpha != 0.3)
    assert_clean(executor)


@alphas
def test_a_retained_graph_gives_the_same_gradients_again(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    x = torch.randn(2, 6, 16)
    reference(x).backward()
    expected = gradients(reference)
    loss = model(x)
    for keep in (True, True, False):
        loss.backward(retain_graph=keep)
        assert_same(gradients(model), expected, exact=alpha != 0.3)
    del loss
    assert_clean(executor)


@alphas
def test_gradients_of_a_subset_of_parameters_hold(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    x = torch.randn(2, 6, 16)

    def some(network: nn.Module) -> list[torch.Tensor]:
        return [network.layers[2].up.weight, network.layers[1].qkv.weight, network.layers[1].norm1.bias]

    loss, expected = model(x), torch.autograd.grad(reference(x), some(reference))
    for keep in (True, False):
        for measured, right in zip(torch.autograd.grad(loss, some(model), retain_graph=keep), expected, strict=True):
            torch.testing.assert_close(measured, right)
    del loss
    assert_clean(executor)


@alphas
def test_second_derivatives_hold(alpha: float) -> None:
    torch.manual_seed(0)

    class Smooth(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(torch.tanh(self.inner(x)).exp())

    model = Stack(2, Smooth).double()
    reference = twin(model)
    executor = tokenwise(model, alpha)
    x = torch.randn(2, 6, 16, dtype=torch.double)
    for network in (model, reference):
        first = torch.autograd.grad(network(x), list(network.parameters()), create_graph=True)
        sum(g.square().sum() for g in first).backward()
        del first
    assert_same(gradients(model), gradients(reference), exact=False)
    assert_clean(executor)


# -- forwards of every kind ----------------------------------------------------------------------------------------------------------


class Plain(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.inner(self.norm(x)))) + x


class NeedsNoInputGradient(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.inner(x.detach())))


class ReusesOutput(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return (y.sigmoid() * y.tanh() * y)[..., :16] + x


class Transposes(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x.transpose(0, 1)).transpose(0, 1)
        z = y.mT @ y
        return x + (self.out(y) * z.mean()).tanh()


class Checkpoints(Layer):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x)).sigmoid()
        return x + checkpoint(lambda y: self.out(y.tanh()).exp().tanh(), y, use_reentrant=self.reentrant).sin()


class CheckpointsReentrantly(Checkpoints):
    reentrant = True


class Embeds(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = (x.detach() * 3).long().clamp(0, 15).sum(-1) % 16
        return x + F.embedding(index, self.inner.weight[:16]) * self.norm(x)


class Branches(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y = y.sigmoid() if y.sum().item() > 0 else y.tanh()
        return x + self.out(y * 2)


class Selects(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        picked = y[y > 0]
        rows = (y.sum(-1) > 0).nonzero()
        flat = x.reshape(-1, 16)
        return x + picked.exp().tanh().mean() + self.out(y).sigmoid() + flat[rows[:, 0]].sin().mean()


class Routes(Layer):
    """A mixture of experts: which expert a token goes to must not depend on rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, 16)
        weight, expert = self.router(self.norm(tokens)).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(tokens)
        for index, network in enumerate(self.experts):
            row, choice = (expert == index).nonzero(as_tuple=True)
            out.index_add_(0, row, network(tokens[row]) * weight[row, choice, None])
        return x + out.view_as(x)


class RoutesByCounts(Routes):
    """Routing as models do that hand the host a list of token counts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, 16)
        weight, expert = self.router(self.norm(tokens)).softmax(-1).max(-1)
        order = expert.argsort()
        counts = (expert[None] == torch.arange(4)[:, None]).sum(-1).tolist()
        parts = tokens[order].split(counts)
        out = torch.cat([network(part) for network, part in zip(self.experts, parts, strict=True)])
        return x + (out[order.argsort()] * weight[:, None]).view_as(x)


class AsksNumpy(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        factor = float((y.detach() * 2).numpy().max())
        return x + self.out((y / factor).sigmoid())


class WritesOutput(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return x + self.out(y.relu_().sigmoid())


class WritesAfterUse(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        z = y * 1.5  # reads the value of before, saves nothing of it
        y += 1
        y *= z
        return x + self.out(torch.sigmoid(y) * z)


class WritesSlices(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y[..., :8].mul_(0.5)
        y[0].add_(1)
        return x + self.out(y.tanh()) * y[..., :16].exp()


class WritesInput(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x + 1).sigmoid()
        x.mul_(0.5)
        return x.add_(self.out(y * y)).tanh()


class FillsBuffer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(*x.shape[:-1], 32)
        y[..., :16] = x.sigmoid()
        y[..., 16:] = self.inner(x)[..., 16:]
        return x + self.out(y.tanh())


class Accumulates(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for part in self.inner(x).chunk(2, -1):
            total += part.sigmoid()
            total = total * part
        return x + total


class Statistics(Layer):
    """Updates a buffer of its own in place, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.detach().mean((0, 1)))
        return x + self.out((y + self.mean).sigmoid())


class Counts(Layer):
    """A buffer that only counts, as load balancing of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.tokens += (y.detach() > 0).sum()
        return x + self.out(y.sigmoid())


class TwoReads(torch.autograd.Function):
    """Asks for its saved tensors once for each of them, as many hand-written functions do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = (x * y).sigmoid()
        ctx.save_for_backward(x, y, z)
        return z

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, z = ctx.saved_tensors[0], ctx.saved_tensors[1], ctx.saved_tensors[2]
        gradient = gradient * z * (1 - z)
        return gradient * y, gradient * ctx.saved_tensors[0] + 0 * x


class ReadsTwice(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x))
        return x + self.out(TwoReads.apply(y, y.tanh()))


class Invisible(torch.autograd.Function):
    """Its kernel is no operator of torch: it works on addresses, as Triton and pybind kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape)
        y.numpy()[...] = 1 / (1 + np.exp(-x.numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y)


class RunsInvisibleKernel(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(Invisible.apply(self.inner(self.norm(x)) * 2))


class Complex(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.inner(x).unflatten(-1, (16, 2)))
        turn = torch.polar(torch.ones(16), torch.arange(16.0))
        w = (z * turn).conj()
        return x + (w @ z.mT @ w.conj()).real.tanh() * self.out(torch.view_as_real((w * w.conj()).contiguous()).flatten(-2))


class Convolves(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, None].to(memory_format=torch.channels_last)
        return x + self.out(self.inner(self.convolution(image).sigmoid().mean(1)).tanh())


class Expands(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.inner(x.mean((0, 1), keepdim=True)).expand(*x.shape[:2], -1)
        return x + self.out(one.sigmoid() * self.inner(x))


class MultiplyAdds(Layer):
    """Batched products with every kind of bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        scores = torch.baddbmm(x[:, :, : x.shape[1]], y, y.mT, beta=0.5, alpha=0.1).softmax(-1)
        flat = torch.addmm(y.reshape(-1, 32), x.reshape(-1, 16), self.inner.weight.t(), beta=0.5, alpha=2.0)
        return x + self.out((scores @ flat.view_as(y)).sigmoid())


class Gathers(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).sigmoid()
        value, index = y.sort(-1)
        return x + self.out(value * torch.gather(y, -1, index.flip(-1)) * y.cumsum(1))


class RunsRecurrently(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x[:, 0]
        states = []
        for step in range(x.shape[1]):
            state = self.out(self.inner(state + x[:, step]).tanh()).sigmoid()
            states.append(state)
        return x + torch.stack(states, 1)


FORWARDS = [
    Block, Plain, NeedsNoInputGradient, ReusesOutput, Transposes, Checkpoints, CheckpointsReentrantly, Embeds, Branches, Selects, Routes,
    RoutesByCounts, AsksNumpy, WritesOutput, WritesAfterUse, WritesSlices, WritesInput, FillsBuffer, Accumulates, Statistics, Counts,
    ReadsTwice, RunsInvisibleKernel, Complex, Convolves, Expands, MultiplyAdds, Gathers, RunsRecurrently,
]  # fmt: skip


@alphas
@pytest.mark.parametrize("block", FORWARDS, ids=lambda block: block.__name__)
def test_gradients_hold_whatever_the_forward_does(block: Callable[[], nn.Module], alpha: float) -> None:
    train_alike(block, alpha)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("block", FORWARDS, ids=lambda block: block.__name__)
def test_gradients_hold_whatever_the_forward_does_while_copies_run_late(block: Callable[[], nn.Module], alpha: float) -> None:
    train_alike(block, alpha, device=SimulatedDevice("late"))


@alphas
@pytest.mark.parametrize("block", FORWARDS, ids=lambda block: block.__name__)
def test_gradients_hold_where_small_tensors_stay_on_the_device(block: Callable[[], nn.Module], alpha: float) -> None:
    train_alike(block, alpha, min_offload_bytes=1 << 30)
