"""Small models of the tests, and functions that run them with and without the executor."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memplug.device.device import Device, device_of
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.region import Region

ALPHAS = [0.4, 1.0]  # swap some rows of a matmul, or all rows
alphas = pytest.mark.parametrize("alpha", ALPHAS)
LAYERS = ["layers.*"]  # the regions of a `Stack`


class Block(nn.Module):
    """A decoder-like layer: norm, attention, gated MLP.

    With `in_place`, it writes to a matmul's output that the executor has captured already.
    """

    def __init__(self, width: int = 16, heads: int = 2, bias: bool = True, in_place: bool = False):
        super().__init__()
        self.in_place = in_place
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=bias)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=bias)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        up = self.up(y)
        hidden = torch.sigmoid(self.gate(y)) * (up.relu_() if self.in_place else up.relu())
        if scale is not None:
            hidden = hidden * scale
        return x + self.down(hidden)


class Layer(nn.Module):
    """A base class with the parameters that a small forward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)


class Stack(nn.Module):
    """Some blocks in a row and a loss."""

    def __init__(self, layers: int = 4, block: Callable[[], nn.Module] = Block):
        super().__init__()
        self.layers = nn.ModuleList([block() for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0  # region inputs are not leaves
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def tokenwise(
    model: nn.Module,
    alpha: float,
    device: Device | None = None,
    host_budget_bytes: int = 1 << 30,
    **settings: Any,
) -> Executor:
    """Make every entry of `model.layers` a region of a new executor, without any of the package's hooks.

    `model.regions` has the regions.
    """
    executor = Executor(
        device or device_of(torch.get_default_device()), host_budget_bytes, **{"min_offload_bytes": 1, **settings}
    )
    model.regions = []
    for index, layer in enumerate(model.layers):
        model.regions.append(Region(f"layers.{index}", type(layer).__name__, alpha))
        layer.forward = _through(executor, model.regions[-1], layer.forward)
    return executor


def _through(executor: Executor, region: Region, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: executor.run(region, call, args, kwargs)


def functional(
    call: Callable[..., Any], alpha: float, device: Device | None = None, **settings: Any
) -> tuple[Callable[..., Any], Any]:
    """Make a region of one function, and return it with its executor."""
    model = nn.Module()
    model.layers = [nn.Module()]
    model.layers[0].forward = call
    executor = tokenwise(model, alpha, device, **settings)
    return model.layers[0].forward, executor


def twin(model: nn.Module) -> nn.Module:
    """Return a copy with the same parameters, to serve as the reference."""
    return copy.deepcopy(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by parameter name, and remove them from the model."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def assert_same(measured: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], exact: bool = True) -> None:
    """Assert that gradients are equal: to the bit, or within the rounding of a matmul of their dtype."""
    assert measured.keys() == expected.keys()
    for name, gradient in measured.items():
        if exact:
            assert torch.equal(gradient, expected[name]), (
                f"{name} differs by {(gradient - expected[name]).abs().max():.3g}"
            )
        else:
            torch.testing.assert_close(gradient, expected[name], msg=lambda text, name=name: f"{name}: {text}")


def assert_clean(executor: Executor) -> None:
    """Assert that no graph is alive and that none left memory on the device or the host."""
    for _ in range(100):  # after an error on a device, autograd's own thread is the last to release the graph
        if executor.flow.live == 0 or executor.device.kind == "cpu":
            break
        time.sleep(0.02)
    executor.transfer.drain()
    assert executor.flow.live == 0
    assert executor.pool.used_bytes == 0
    assert (
        executor.transfer.prefetched_bytes == 0
        and executor.flow.recomputed_bytes == 0
        and executor.flow.input_bytes == 0
    )


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection inside the `with`, so that reference counts alone free memory."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def train_alike(
    block: Callable[[], nn.Module],
    alpha: float,
    device: Device | None = None,
    steps: int = 2,
    layers: int = 3,
    exact: bool | None = None,
    **settings: Any,
) -> Executor:
    """Train a stack of blocks and its twin on the same data and seeds, and compare them after every step.

    Losses, gradients and buffers must be equal.

    Args:
        block: makes one block.
        alpha: the fraction of rows that the regions swap.
        device: the device to train on, by default torch's own.
        steps: number of steps.
        layers: number of blocks.
        exact: compare to the bit; by default if `alpha` is 0 or 1, since then the recompute pass runs no matmul in
            another shape than forward.
        **settings: settings of the executor.
    """
    torch.manual_seed(0)
    model = Stack(layers, block)
    reference = twin(model)
    executor = tokenwise(model, alpha, device, **settings)
    exact = alpha in (0, 1) if exact is None else exact
    with device if device is not None else contextlib.nullcontext():
        for step, x in enumerate(torch.randn(steps, 2, 6, 16)):
            for network in (model, reference):
                torch.manual_seed(step)
                network(x).backward()
            assert_same(gradients(model), gradients(reference), exact)
            for (name, buffer), right in zip(model.named_buffers(), reference.buffers(), strict=True):
                assert torch.equal(buffer, right), name
        assert_clean(executor)
    if device is not None:
        device.synchronize()
        assert not device.violations
    return executor


def train_stacks(model: nn.Module, reference: nn.Module, seed: int, exact: bool = True) -> None:
    """Run one step of both models on the same data; raise AssertionError where gradients differ."""
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed))
    model(x).backward()
    reference(x).backward()
    assert_same(gradients(model), gradients(reference), exact)


class Drops(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.out(F.dropout(self.inner(x).sigmoid(), 0.3)), 0.3).sin()


class DropsAttention(Block):
    """A block with a captured operator that draws random numbers, and another draw after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        return x + F.dropout(self.out(attended.transpose(1, 2).reshape_as(x)), 0.4).sin()
