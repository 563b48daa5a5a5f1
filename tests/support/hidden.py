"""A decoder-like layer whose kernels no operator shows, like those of Transformer Engine.

memplug sees the tensors that the kernels save for backward only through saved-tensor hooks.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.operators import CaptureKind
from memplug.tokenwise.engine.units import Unit


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hide the operators inside the `with` from every observer."""
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


class NormLinear(torch.autograd.Function):
    """RMS norm and a product; saves the normalized input, as large as the input, and one reciprocal for each token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with hidden():
            reciprocal = x.square().mean(-1, keepdim=True).add(1e-5).rsqrt()
            normalized = x * reciprocal
            ctx.save_for_backward(normalized, reciprocal, weight)
            return normalized @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        normalized, reciprocal, weight = ctx.saved_tensors
        rows = gradient @ weight
        of_input = reciprocal * (rows - normalized * (rows * normalized).mean(-1, keepdim=True))
        return of_input, gradient.flatten(0, -2).t() @ normalized.flatten(0, -2)


class Product(torch.autograd.Function):
    """A product; saves its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with hidden():
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class Attention(torch.autograd.Function):
    """Causal attention; saves its inputs, its result, and the logarithms of the sums, which are small.

    Backward frees the memory of the saved tensors, as Transformer Engine's does.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with hidden():
            scores = Attention.scores(q, k)
            sums = scores.logsumexp(-1)
            out = (scores - sums.unsqueeze(-1)).exp() @ v
            ctx.save_for_backward(q, k, v, out, sums)
            return out

    @staticmethod
    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        chances = (Attention.scores(q, k) - sums.unsqueeze(-1)).exp()
        of_chances = gradient @ v.transpose(-1, -2)
        of_scores = chances * (of_chances - (gradient * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        found = of_scores @ k, of_scores.transpose(-1, -2) @ q, chances.transpose(-1, -2) @ gradient
        for saved in (q, k, v, out, sums):
            saved.data = saved.new_empty(0)
        return found


class Part(nn.Module):
    """Runs a hidden function, and counts its runs."""

    def __init__(self, function: type[torch.autograd.Function], *size: int):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(*size) / size[-1] ** 0.5) if size else None
        self.runs = 0

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.function.apply(*tensors, *([] if self.weight is None else [self.weight]))


class HiddenBlock(nn.Module):
    """Norm and qkv, attention, projection and gated MLP: hidden parts with visible operators between them."""

    kinds = {
        "qkv": CaptureKind.ROWS,
        "attention": CaptureKind.ATTENTION,
        "projection": CaptureKind.ROWS,
        "up": CaptureKind.ROWS,
        "down": CaptureKind.ROWS,
    }

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Part(NormLinear, 3 * width, width)
        self.attention = Part(Attention)
        self.projection = Part(Product, width, width)
        self.up = Part(NormLinear, 4 * width, width)
        self.down = Part(Product, width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for each in self.qkv(x).chunk(3, dim=-1))
        x = x + self.projection(self.attention(q, k, v).transpose(-2, -3).flatten(-2))
        gate, up = self.up(x).chunk(2, dim=-1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


def make_units(model: nn.Module, executor: Executor) -> None:
    """Make the hidden parts of every layer of a `Stack` units, without any of the package's hooks."""
    for layer in model.layers:
        for name, kind in layer.kinds.items():
            run_as_unit(getattr(layer, name), Unit(executor, name, kind))


def run_as_unit(module: nn.Module, unit: Unit) -> None:
    """Make a module's forward run as a unit."""
    call = module.forward
    module.forward = lambda *args, **kwargs: unit.run(call, args, kwargs)


def runs(model: nn.Module) -> collections.Counter[str]:
    """Return how often each part ran in all layers, by name, and reset the counts."""
    counted: collections.Counter[str] = collections.Counter()
    for layer in model.layers:
        for name in layer.kinds:
            part = getattr(layer, name)
            counted[name] += part.runs
            part.runs = 0
    return counted
