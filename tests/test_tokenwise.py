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
from memplug.execute.saved import copy_of
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


# -- what stays untouched --------------------------------------------------------------------------------------------


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


# -- graphs in flight ------------------------------------------------------------------------------------------------


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
    executor = tokenwise(model, alpha, late := SimulatedDevice("late"))
    data = torch.randn(6, 2, 6, 16)
    for network, device in ((model, late), (reference, contextlib.nullcontext())):
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
        used = [p for layer in network.layers for p in (*layer.inner.parameters(), *layer.out.parameters())]
        first = torch.autograd.grad(network(x), used, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        del first
    assert_same(gradients(model), gradients(reference), exact=False)
    assert_clean(executor)


# -- forwards of every kind ------------------------------------------------------------------------------------------


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
        return x + picked.tanh().sigmoid().mean() + self.out(y).sigmoid() + flat[rows[:, 0]].sin().sum() / 100


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
        return x.add_(self.out(y * y)).sin()


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
        return x + (w @ z.mT @ w.conj()).real.tanh() * self.out(
            torch.view_as_real((w * w.conj()).contiguous()).flatten(-2)
        )


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
    Block,
    Plain,
    NeedsNoInputGradient,
    ReusesOutput,
    Transposes,
    Checkpoints,
    CheckpointsReentrantly,
    Embeds,
    Branches,
    Selects,
    Routes,
    RoutesByCounts,
    AsksNumpy,
    WritesOutput,
    WritesAfterUse,
    WritesSlices,
    WritesInput,
    FillsBuffer,
    Accumulates,
    Statistics,
    Counts,
    ReadsTwice,
    RunsInvisibleKernel,
    Complex,
    Convolves,
    Expands,
    MultiplyAdds,
    Gathers,
    RunsRecurrently,
]


@alphas
@pytest.mark.parametrize("block", FORWARDS, ids=lambda block: block.__name__)
def test_gradients_hold_whatever_the_forward_does(block: Callable[[], nn.Module], alpha: float) -> None:
    train_alike(block, alpha)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("block", FORWARDS, ids=lambda block: block.__name__)
def test_gradients_hold_whatever_the_forward_does_while_copies_run_late(
    block: Callable[[], nn.Module], alpha: float
) -> None:
    train_alike(block, alpha, device=SimulatedDevice("late"))


@alphas
@pytest.mark.parametrize("block", FORWARDS, ids=lambda block: block.__name__)
def test_gradients_hold_where_small_tensors_stay_on_the_device(block: Callable[[], nn.Module], alpha: float) -> None:
    train_alike(block, alpha, min_offload_bytes=1 << 30)


# -- what must be recomputed, and what must not ----------------------------------------------------------------------


def backward_calls(
    block: Callable[[], nn.Module], alpha: float, layers: int = 3, step: int = 2
) -> collections.Counter[str]:
    """Operators that run in the backward of the given step beyond those of the same model without regions."""
    torch.manual_seed(0)
    model = Stack(layers, block)
    reference = twin(model)
    tokenwise(model, alpha)
    for x in torch.randn(step, 2, 6, 16):
        counts = []
        for network in (model, reference):
            loss = network(x)
            with Counter() as counter:
                loss.backward()
            counts.append(counter.calls)
    return counts[0] - counts[1]


MATMULS = ("mm", "addmm", "bmm", "baddbmm")


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 3 * 4), (0.5, 4), (1.0, 0)])
def test_backward_runs_the_matmuls_that_were_not_swapped_and_the_dead_last_one_never(
    alpha: float, expected: int
) -> None:
    """A block has five; nothing reads the output of the last one but the residual sum behind it. Two of three blocks
    are still on the device.
    """
    calls = backward_calls(Block, alpha)
    assert sum(calls[name] for name in MATMULS) == expected
    assert not any("attention" in name for name in calls)


def test_a_region_whose_saved_tensors_are_all_captured_runs_nothing_again() -> None:
    class Linear(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.inner(x))

    calls = backward_calls(Linear, 1.0)
    assert not {
        name for name in calls if name not in ("as_strided", "detach", "copy_", "empty_strided", "slice", "t", "view")
    }, calls


def test_attention_is_run_again_where_it_is_not_captured() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    reference = twin(model)
    executor = tokenwise(model, 0.0, attention=False)
    x = torch.randn(2, 6, 16)
    loss = model(x)
    with Counter() as counter:
        loss.backward()
    assert sum(count for name, count in counter.calls.items() if "attention" in name and "backward" not in name) == 2
    reference(x).backward()
    assert_same(gradients(model), gradients(reference))
    del loss
    assert_clean(executor)


def test_an_unread_routing_choice_is_not_made_again() -> None:
    assert backward_calls(Routes, 0.0)["topk"] == 0


# -- random numbers --------------------------------------------------------------------------------------------------


class Drops(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.out(F.dropout(self.inner(x).sigmoid(), 0.3)), 0.3).sin()


class DropsAttention(Block):
    """A captured operator that draws random numbers, and another draw behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        return x + F.dropout(self.out(attended.transpose(1, 2).reshape_as(x)), 0.4).sin()


class DropsInPlace(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.empty_like(x).bernoulli_(0.5)
        noise = torch.randn_like(x)
        return (
            x
            + self.out(F.dropout(self.inner(x), 0.2, inplace=True).tanh()) * mask
            + (x * noise).sin()
            + torch.rand(1) * x
        )


class Samples(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        row = torch.multinomial(y.reshape(-1, 32).softmax(-1).detach(), 3)
        return x + self.out(y * torch.gather(y.reshape(-1, 32), 1, row).sum().sigmoid() * torch.rand_like(y))


RANDOM = [Drops, DropsAttention, DropsInPlace, Samples]


@alphas
@pytest.mark.parametrize("block", RANDOM, ids=lambda block: block.__name__)
def test_random_numbers_are_those_of_forward(block: Callable[[], nn.Module], alpha: float) -> None:
    train_alike(block, alpha)


@alphas
@pytest.mark.parametrize("block", RANDOM, ids=lambda block: block.__name__)
def test_backward_leaves_the_random_generator_as_it_found_it(block: Callable[[], nn.Module], alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(2, block)
    tokenwise(model, alpha)
    loss = model(torch.randn(2, 6, 16))
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


class DrawsBehindCapturedAttention(torch.nn.Module):
    """Attention by an operator of its own that draws random numbers, nothing of which a recompute pass needs but its
    draws.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = torch.ops.flash_attn._random_forward(x, 0.3)
        return x * F.dropout(x @ self.weight, 0.5).sigmoid() + attended


def test_an_unread_captured_operator_still_advances_the_random_generator(
    flash_operators: collections.Counter[str],
) -> None:
    for alpha in ALPHAS:
        train_alike(DrawsBehindCapturedAttention, alpha)


@pytest.fixture(scope="module")
def flash_operators() -> Iterator[collections.Counter[str]]:
    """Operators as flash-attn registers them, counted."""
    calls: collections.Counter[str] = collections.Counter()
    with torch.library._scoped_library("flash_attn", "FRAGMENT") as library:
        library.define(
            "_random_forward(Tensor x, float dropout_p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
        )

        def forward(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
            calls["forward"] += 1
            return torch.rand_like(x)

        library.impl("_random_forward", forward, "CPU")
        yield calls


# -- parameters and outputs ------------------------------------------------------------------------------------------


@alphas
def test_gradients_hold_with_frozen_parameters_and_adapters(alpha: float) -> None:
    class Adapted(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return x + self.out(F.silu(self.inner(y) + self.up(self.down(y))))

    train_alike(Adapted, alpha)


@alphas
def test_gradients_hold_where_an_input_is_written_and_no_parameter_needs_gradients(alpha: float) -> None:
    """Then the graph of the recompute pass hangs on the input alone."""

    class Frozen(WritesInput):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)

    torch.manual_seed(0)
    for settings in ({}, {"min_offload_bytes": 1 << 30}):
        model = Stack(3, Frozen)
        reference = twin(model)
        executor = tokenwise(model, alpha, **settings)
        x, y = (torch.randn(2, 6, 16).requires_grad_() for _ in range(2))
        y.data.copy_(x)
        model(x).backward()
        reference(y).backward()
        assert_same({"x": x.grad}, {"x": y.grad}, exact=alpha != 0.3)
        assert_clean(executor)


@alphas
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_hold_with_a_weight_that_two_regions_share(alpha: float, autocast: bool) -> None:
    torch.manual_seed(0)
    model = Stack(3, Plain)
    model.layers[2].inner.weight = model.layers[0].inner.weight
    model.layers[1].out.weight = nn.Parameter(model.layers[0].inner.weight.detach().t().clone())
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for x in torch.randn(2, 2, 6, 16):
        for network in (model, reference):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = network(x)
            loss.backward()
            del loss
        measured, expected = gradients(model), gradients(reference)
        if autocast:  # the shared weight's gradient is summed in bf16 or in fp32
            for name in measured:
                torch.testing.assert_close(measured[name], expected[name], rtol=0.02, atol=0.002)
        else:
            assert_same(measured, expected, exact=alpha != 0.3)
    assert_clean(executor)


@alphas
def test_gradients_hold_under_autocast_to_the_bit(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for x in torch.randn(2, 2, 6, 16):
        for network in (model, reference):
            with torch.autocast("cpu", torch.bfloat16):
                loss = network(x)
            loss.backward()
            del loss
        measured, expected = gradients(model), gradients(reference)
        if alpha != 0.3:
            assert_same(measured, expected)
        for name in measured:
            torch.testing.assert_close(measured[name], expected[name], rtol=0.02, atol=0.002)
    assert_clean(executor)


class Structured(Layer):
    """Takes and gives tensors in every container."""

    def forward(
        self, state: dict[str, Any], *, mask: torch.Tensor | None = None, scale: float = 1.0, extra: tuple = ()
    ) -> dict[str, Any]:
        y = self.inner(self.norm(state["x"])).sigmoid()
        if mask is not None:
            y = y * mask
        for tensor in extra:
            y = y + tensor
        return {
            "x": state["x"] + self.out(y) * scale,
            "nothing": None,
            "aux": (y.square().mean(), [y[0], 3]),
            "index": y.argmax(-1),
        }


@alphas
def test_gradients_hold_for_nested_arguments_and_outputs(alpha: float) -> None:
    torch.manual_seed(0)

    class Network(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state, loss = {"x": x * 1.0, "nothing": None}, 0
            mask = torch.rand(2, 6, 32) > 0.3
            for index, layer in enumerate(self.layers):
                extra = (state["aux"][1][0] * 2, torch.ones(32)) if index else ()
                state = layer(state, mask=mask if index % 2 else None, scale=0.5 + index, extra=extra)
                loss = loss + state["aux"][0] + state["aux"][1][0].sin().mean() + state["index"].sum() * 0
            return loss + state["x"].square().mean()

    model = Network(3, Structured)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for x in torch.randn(2, 2, 6, 16):
        for network in (model, reference):
            torch.manual_seed(1)
            network(x).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha != 0.3)
    assert_clean(executor)


def functional(
    call: Callable[..., Any], alpha: float, device: Device | None = None, **settings: Any
) -> tuple[Callable[..., Any], Any]:
    """A region of one function, and its executor."""
    model = nn.Module()
    model.layers = [nn.Module()]
    model.layers[0].forward = call
    executor = tokenwise(model, alpha, device, **settings)
    return model.layers[0].forward, executor


@alphas
def test_views_of_one_tensor_are_separate_inputs(alpha: float) -> None:
    """Neighbouring regions share the copy of an input; a transposed square one is another input."""
    torch.manual_seed(0)
    weight = torch.randn(8, 8, requires_grad=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sigmoid() + x.exp().tanh()

    region, executor = functional(call, alpha)
    results = []
    for run in (region, call):
        x = torch.arange(64.0).view(8, 8).div(64).requires_grad_()
        y = x * 1.0
        (run(y) + 2 * run(y.t()) + run(y.view(-1).view(8, 8)) * run(y.t())).sum().backward()
        results.append({"x": x.grad, "weight": weight.grad})
        weight.grad = None
    assert_same(*results, exact=alpha != 0.3)
    del y
    assert_clean(executor)


def test_memory_is_let_go_after_the_last_of_its_copies_whatever_the_order_of_the_inputs() -> None:
    """The second region shares an older copy of one input, and the region that began it is gone."""

    def call(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return new.sigmoid() * old.tanh()

    region, executor = functional(call, 0.0, device := SimulatedDevice("late"))
    gradient = {}
    for run in (region, call):
        with device:
            x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
            old = x * 1.0
            dropped = run(old, old * 2.0)
            out = run(old * 3.0, old)
            del dropped
            more = [run(old * 4.0, old * 5.0) for _ in range(2)]
            (out.sum() + sum(part.sum() for part in more)).backward()
            gradient[run] = x.grad
            del out, more, old
    assert_same({"x": gradient[region]}, {"x": gradient[call]})
    assert_clean(executor)


@alphas
@pytest.mark.parametrize("schedule", ["late", "early"])
def test_a_captured_output_may_leave_the_region_as_any_view(alpha: float, schedule: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 8, requires_grad=True)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ weight
        return y.t(), y[2:].view(-1), (y.sigmoid() * y)

    results = []
    region, executor = functional(call, alpha, device := SimulatedDevice(schedule))
    with device:
        for run in (region, call):
            for data in torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)):
                x = data.requires_grad_()
                loss = sum(part.sin().sum() * (i + 1) for i, part in enumerate(run(x * 1.0)))
                loss.backward()
                results.append({"x": x.grad, "weight": weight.grad})
                weight.grad = None
                del loss
        assert_clean(executor)
    for measured, expected in zip(results[:2], results[2:], strict=True):
        assert_same(measured, expected, exact=alpha != 0.3)


WRITES = {
    "add_": lambda y: y.add_(1),
    "slice": lambda y: y[:2].mul_(2),
    "transposed": lambda y: y.t().add_(1),
    "no_grad": lambda y: _under_no_grad(y),
}


def _under_no_grad(y: torch.Tensor) -> None:
    with torch.no_grad():
        y.add_(1)


@alphas
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("schedule", ["late", "early"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("more", [0, 3])
def test_an_output_written_by_the_caller_gives_right_gradients_or_an_error(
    alpha: float, small: bool, schedule: str, write: str, more: int
) -> None:
    """The output is a captured product that the region's backward needs; the copy out may be under way. torch itself
    refuses where it saved the output.
    """
    weight = torch.randn(8, 8, requires_grad=True, generator=torch.Generator().manual_seed(0))

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ weight
        return y, (y * 2).sigmoid()

    settings = {"min_offload_bytes": 1 << 30} if small else {}
    region, executor = functional(call, alpha, device := SimulatedDevice(schedule), **settings)

    def train(run: Callable[..., Any]) -> dict[str, torch.Tensor]:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y, z = run(x * 1.0)
        WRITES[write](y)
        total = y.sin().sum() + z.sum()
        for _ in range(more):  # by then its memory would have been let go
            total = total + sum(part.sum() for part in run(x * 3.0))
        total.backward()
        gradient, weight.grad = weight.grad, None
        return {"x": x.grad, "weight": gradient}

    with device:
        expected = train(call)
        try:
            measured = train(region)
        except InPlaceError:
            weight.grad = None
        else:
            assert_same(measured, expected, exact=False)
            assert not device.violations
        with contextlib.suppress(UnboundLocalError):
            del measured
        gc.collect()
        assert_clean(executor)


@alphas
@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("schedule", ["late", "early"])
def test_an_input_written_after_its_region_gives_right_gradients_or_an_error(
    alpha: float, more: int, small: bool, schedule: str
) -> None:
    weight = torch.randn(8, 8, requires_grad=True, generator=torch.Generator().manual_seed(0))

    def call(x: torch.Tensor) -> torch.Tensor:
        return (x * 2) @ weight  # saves nothing of x itself

    settings = {"min_offload_bytes": 1 << 30} if small else {}
    region, executor = functional(call, alpha, device := SimulatedDevice(schedule), **settings)

    def train(run: Callable[..., Any]) -> dict[str, torch.Tensor]:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = x * 1.0
        total = run(y).sum()
        y.add_(1)
        for _ in range(more):
            total = total + run(x * 3.0).sum()
        (total + y.sum()).backward()
        gradient, weight.grad = weight.grad, None
        return {"x": x.grad, "weight": gradient}

    with device:
        expected = train(call)
        try:
            assert_same(train(region), expected, exact=False)
        except (InPlaceError, RuntimeError) as error:
            assert "in place" in str(error) or "inplace" in str(error)
            weight.grad = None
        gc.collect()
        assert_clean(executor)


@alphas
@pytest.mark.parametrize("small", [False, True])
def test_a_saved_tensor_written_later_in_the_region_is_an_error_as_in_torch(alpha: float, small: bool) -> None:
    def operator_output(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = (x @ weight).sigmoid()  # saves its output
        y.mul_(2)
        return y

    def operator_input(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.sin()  # saves its input
        y.add_(1)
        return y @ weight + z

    def buffer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:4] = x[:4]
        z = y.exp()
        z[0] = 0
        return z @ weight

    for call in (operator_output, operator_input, buffer):
        weight = torch.randn(8, 8, requires_grad=True)
        region, executor = functional(call, alpha, **({"min_offload_bytes": 1 << 30} if small else {}))
        x = torch.randn(8, 8, requires_grad=True)
        for run in (call, region):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                run(x * 1.0, weight).sum().backward()
        gc.collect()
        assert_clean(executor)


@alphas
@pytest.mark.parametrize("name", ["gate.weight", "norm1.weight"])
def test_a_parameter_written_between_forward_and_backward_is_an_error_as_in_torch(alpha: float, name: str) -> None:
    model = Stack(2)
    reference = twin(model)
    tokenwise(model, alpha)
    for network in (reference, model):
        loss = network(torch.randn(2, 6, 16))
        with torch.no_grad():
            network.layers[0].get_parameter(name).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_copy_of_a_view_lies_in_memory_as_the_view_does() -> None:
    view = torch.arange(24.0).view(4, 6)[1:, 2:].t()
    copy = copy_of(view)
    assert torch.equal(copy, view) and copy.data_ptr() != view.data_ptr()
    assert (copy.stride(), copy.storage_offset()) == (view.stride(), view.storage_offset())


@alphas
def test_a_conjugate_view_of_a_captured_tensor_keeps_its_conjugation(alpha: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 8, dtype=torch.complex64, requires_grad=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        return y.conj() * x

    region, executor = functional(call, alpha)
    results = []
    for run in (region, call):
        x = torch.randn(8, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        run(x * 1.0).abs().sum().backward()
        results.append({"x": x.grad, "weight": weight.grad})
        weight.grad = None
    assert_same(*results, exact=alpha != 0.3)
    assert_clean(executor)


# -- checkpoints around regions, errors, leaks -----------------------------------------------------------------------


@alphas
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_hold_inside_a_checkpoint(alpha: float, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Stack(4)
    reference = twin(model)
    executor = tokenwise(model, alpha)

    def run(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for begin in (0, 2):
            x = checkpoint(
                lambda x, layers=network.layers[begin : begin + 2]: layers[1](layers[0](x).sin()),
                x,
                use_reentrant=reentrant,
            )
        return x.square().mean()

    for data in torch.randn(2, 2, 6, 16):
        for network in (model, reference):
            run(network, data.clone().requires_grad_()).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha != 0.3)
    assert_clean(executor)


class Stop(Exception):
    """Raised in the middle of a pass."""


class Fails(Block):
    armed = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x).sigmoid()
        if self.armed == "forward" or self.armed == "recompute" and not torch.is_grad_enabled():
            raise Stop
        if self.armed == "backward":
            x.register_hook(_stop)
        if self.armed == "recompute":
            self.armed = "forward"
        return x


def _stop(gradient: torch.Tensor) -> None:
    raise Stop


@alphas
@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_an_error_leaves_nothing_behind_and_the_next_step_is_right(alpha: float, where: str, layer: int) -> None:
    torch.manual_seed(0)
    model = Stack(4, Fails)
    reference = twin(model)
    executor = tokenwise(model, alpha, device := SimulatedDevice("late"))
    x = torch.randn(3, 2, 6, 16)
    with device, no_garbage_collection():
        model(x[0]).backward()
        gradients(model)
        model.layers[layer].armed = where
        with contextlib.suppress(Stop):
            model(x[1]).backward()
        model.layers[layer].armed = ""
        assert executor.pauses == 0 and executor.recomputing == 0
        assert_clean(executor)
        model.zero_grad()
        model(x[2]).backward()
        reference(x[2]).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha != 0.3)
        assert_clean(executor)
    assert not device.violations


@alphas
def test_an_error_before_a_forward_begins_leaves_nothing_behind(alpha: float) -> None:
    class Broken(Device):
        def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
            raise Stop

    model = Stack(2)
    executor = tokenwise(model, alpha, Broken())
    with no_garbage_collection():
        with pytest.raises(Stop):
            model(torch.randn(2, 6, 16))
        assert_clean(executor)


@alphas
def test_steps_leave_no_tensor_behind_without_garbage_collection(alpha: float) -> None:
    model = Stack(3)
    executor = tokenwise(model, alpha)
    x = torch.randn(2, 6, 16)
    for _ in range(3):
        model(x).backward()
    executor.transfer.drain()
    with no_garbage_collection():
        before = live_tensors()
        for _ in range(20):
            model(x).backward()
        assert_clean(executor)
        assert live_tensors() == before


# -- host memory -----------------------------------------------------------------------------------------------------


@alphas
@pytest.mark.parametrize("budget_bytes", [0, 512, 4096])
def test_a_used_up_host_budget_is_said_once_and_gradients_hold(
    alpha: float, budget_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "memplug"):
        executor = train_alike(Block, alpha, host_budget_bytes=budget_bytes, steps=3)
    assert executor.transfer.refused > 0
    assert executor.pool.capacity_bytes <= budget_bytes
    assert sum("host budget" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("budget_bytes", [4096, 20000])
def test_routing_holds_when_the_host_budget_is_used_up(budget_bytes: int) -> None:
    train_alike(Routes, 0.3, host_budget_bytes=budget_bytes)


def test_host_memory_stays_bounded_over_changing_lengths() -> None:
    torch.manual_seed(0)
    model = Stack(3)
    executor = tokenwise(model, 0.7)
    capacities = []
    for _ in range(50):
        length = int(torch.randint(1, 40, ()))
        model(torch.randn(2, length, 16)).backward()
        executor.transfer.drain()
        assert executor.pool.used_bytes == 0
        capacities.append(executor.pool.capacity_bytes)
    assert capacities[-1] == capacities[0]


# -- forwards that are not the same twice ----------------------------------------------------------------------------


class Lazy(Layer):
    """Builds a table in its first forward and finds it in later ones."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(16.0).sin().cos()
        return x + self.out(self.inner(x * self.table).sigmoid())


@alphas
def test_a_second_pass_of_other_operators_recomputes_in_full_and_is_counted(
    alpha: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "memplug"):
        executor = train_alike(Lazy, alpha, layers=2)
    assert executor.divergences == 2  # the first step of each layer
    assert sum("recomputed in full" in record.message for record in caplog.records) == 1


@alphas
def test_a_second_pass_of_fewer_operators_recomputes_in_full_though_each_was_expected(alpha: float) -> None:
    """Forward runs tanh of a table and tanh of the input, the second pass only the latter: it must not be taken for
    the former.
    """
    table: list[torch.Tensor] = []
    constant = torch.randn(8, 8)

    def call(x: torch.Tensor) -> torch.Tensor:
        if not table:
            table.append(torch.tanh(constant))
        return torch.tanh(x)

    region, executor = functional(call, alpha)
    x = torch.randn(8, 8, requires_grad=True)
    region(x * 1.0).sum().backward()
    assert executor.divergences == 1
    torch.testing.assert_close(x.grad, 1 - x.detach().tanh().square())


def test_a_second_pass_that_saves_other_tensors_is_an_error() -> None:
    class Counting(Layer):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for _ in range(self.calls):
                x = x.sin() * self.norm.weight
            return x

    model = Stack(2, Counting)
    tokenwise(model, 0.3)
    with pytest.raises(RecomputeError, match="saved"):
        model(torch.randn(2, 6, 16)).backward()


class Noisy(Device):
    """Brings back rows that differ by a rounding, as another shape of a product gives them."""

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source * (1 - 1e-6) if source.is_floating_point() else source)


def test_a_mask_that_rounding_changes_recomputes_in_full() -> None:
    """A smaller value than forward saw no longer reaches the threshold, and the selection is shorter."""
    torch.manual_seed(0)
    weight = torch.rand(8, 8, requires_grad=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        return y[y * 2 >= (y * 2).max().item()].exp().tanh() + y.sigmoid().sum()

    region, executor = functional(call, 1.0, Noisy())
    x = torch.rand(8, 8)
    gradient = []
    for run in (region, call):
        sum(run(x * (1 + index)).sum() for index in range(4)).backward()
        gradient.append({"weight": weight.grad})
        weight.grad = None
    assert executor.divergences == 2  # the two that have left the device
    assert_same(*gradient, exact=False)


def test_a_branch_taken_in_forward_is_taken_again_though_the_number_rounds_differently() -> None:
    """The sum of the rows is within rounding of the threshold, which is the very value that forward saw."""

    class Threshold(Layer):
        threshold: float | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            seen = (y / 3).sum().item()
            if self.threshold is None:
                self.threshold = seen
            same = seen == self.threshold
            return x + self.out(y.sigmoid() * (1.0 if same else 100.0))

    train_alike(Threshold, 1.0, device=None, steps=1)
    torch.manual_seed(0)
    model = Stack(4, Threshold)
    reference = twin(model)
    tokenwise(model, 0.5, Noisy())
    x = torch.randn(2, 6, 16)
    model(x).backward()
    reference(x).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-3, atol=1e-4)
