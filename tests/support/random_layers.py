"""A grammar of layers: small steps of every kind, from which a layer is made."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.python_state import Slotted, Tracker, counter

WIDTH = 8
Step = Callable[["Layer", torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """Runs some steps, and adds what they make to what it is given.

    Args:
        steps: names of `STEPS`.
    """

    def __init__(self, steps: tuple[str, ...]):
        super().__init__()
        self.steps = steps
        self.linear, self.other, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.lstm, self.batch_norm = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.history, self.tracker, self.slotted = 0, [], Tracker(), Slotted()
        self.counter, self.generator = counter(), torch.Generator().manual_seed(1)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, use: Callable[[torch.Tensor, Any], torch.Tensor], given: Any) -> torch.Tensor:
        y = use(self.linear(x), given)
        for name in self.steps:
            y = STEPS[name](self, y)
        return x + self.other(y)

    def __repr__(self) -> str:
        return f"Layer({', '.join(self.steps)})"


class Cubes(torch.autograd.Function):
    """A function of the model's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


class Squares(torch.autograd.Function):
    """Computes past torch's operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        np.square(x.detach().numpy(), out=made.numpy())
        ctx.save_for_backward(x, made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, made = ctx.saved_tensors
        return gradient * (2 * x + 0 * made)


class Named(torch.Tensor):
    """A subclass that adds nothing."""


class Wrapper(torch.Tensor):
    """A subclass that dispatches for itself."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        return cls(func(*plain, **(kwargs or {})))


# -- operators ---------------------------------------------------------------------------------------------------------


def attention(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    heads = y.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(-2)


def in_place(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return layer.linear(y).mul_(1.5).relu_()


def routed(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    flat = y.flatten(0, 1)
    chosen = flat[:, 0].detach().topk(3).indices
    return flat.index_add(0, chosen, layer.other(flat[chosen])).view_as(y)


def masked(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y.masked_scatter(y > 0, layer.other(y)[y > 0])


def expanded(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * y.mean(1, keepdim=True).expand_as(y)


def strided(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([y[..., ::2].transpose(0, 1), y[..., 1::2].transpose(0, 1)], -1).transpose(0, 1).sin()


def complex_numbers(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    z = torch.fft.rfft(y)
    return torch.fft.irfft(z * z.conj(), WIDTH) + z.imag.neg().mean()


def lazy(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return (torch._neg_view(y) * y).sigmoid()


def sparse(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    weights = torch.eye(WIDTH).to_sparse()
    return torch.sparse.mm(weights, y.flatten(0, 1).t()).t().view_as(y) * y


def quantized(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * torch.quantize_per_tensor(y.detach(), 0.1, 3, torch.quint8).dequantize()


def float8(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * y.detach().to(torch.float8_e4m3fn).to(y.dtype)


def meta(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y.sin() * layer.linear.weight.to("meta").t().shape[0]


def subclass(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return (y * y.detach().as_subclass(Named).sigmoid()).as_subclass(torch.Tensor)


def wrapped(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * Wrapper(y.detach()).mul(2).inner


def recurrent(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return layer.lstm(y)[0]


def jagged(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    nested = torch.nested.nested_tensor_from_jagged(y.flatten(0, 1), torch.tensor([0, 3, 8]))
    return torch.nn.functional.silu(nested).values().view_as(y)


def nested(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([y[0], y[1]]).sin().to_padded_tensor(0.0)


# -- modes -------------------------------------------------------------------------------------------------------------


def without_gradients(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = layer.other(y).softmax(-1)
    return y * scale


def inference(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        scale = layer.other(y).softmax(-1)
    return y * scale.clone()


def inference_saved(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        scale = layer.other(y).softmax(-1)
    return y * scale


def autocast(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return layer.other(y).float().sin()


def checkpointed(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda z: layer.other(z).sin(), y, use_reentrant=False)


def vmapped(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row.sin() * row)(y)


def gradient_inside(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    energy = layer.other(y).sin().sum()
    return torch.autograd.grad(energy, y, create_graph=True)[0]


def functional_gradient(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda z: (z.sin() ** 2).sum())(y)


# -- Python state ------------------------------------------------------------------------------------------------------


def counts(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    layer.calls += 1
    return y * layer.calls


def rebinds(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    layer.mean = 0.5 * layer.mean + y.detach().mean((0, 1))
    return y * layer.mean.clone()


def saves_what_moves(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    y = y * layer.mean
    with torch.no_grad():
        layer.mean.mul_(0.5)
    return y


def moves_in_place(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        layer.count += 1
        layer.mean.mul_(0.5).add_(y.mean((0, 1)))
    return y + layer.mean * layer.count


def appends(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    layer.history.append(y.detach().mean())
    return y * sum(layer.history)


def tracks(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    layer.tracker.calls += 1
    layer.tracker.means.append(y.detach().mean())
    layer.slotted.scale *= 1.5
    return y * len(layer.tracker.means) * layer.slotted.scale


def closes_over(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * layer.counter()


def keeps_graph(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    before, layer.last = layer.last, y
    return y if before is None else y * before.detach()


def draws(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * random.random() * np.random.rand() + torch.rand(WIDTH, generator=layer.generator)


def drops(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return F.dropout(y, 0.3, layer.training)


def skips(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return layer.other(y).sin() if random.random() < 0.5 else y


# -- what makes a region opaque ----------------------------------------------------------------------------------------


def address(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    assert y.data_ptr()
    return y


def raises(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):
        y @ y[..., :3]
    return y


def reshapes(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * torch.zeros(1).set_(y.detach())


def fails(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y @ y


STEPS: dict[str, Step] = {
    "sin": lambda layer, y: y.sin(),
    "linear": lambda layer, y: layer.other(y).sigmoid(),
    "norm": lambda layer, y: layer.norm(y),
    "gelu": lambda layer, y: F.gelu(y),
    "softmax": lambda layer, y: y.softmax(-1),
    "batch norm": lambda layer, y: layer.batch_norm(y),
    "own function": lambda layer, y: Cubes.apply(y.sigmoid()),
    "own kernel": lambda layer, y: Squares.apply(y.sigmoid()),
    **{
        step.__name__.replace("_", " "): step
        for step in (
            *(attention, in_place, routed, masked, expanded, strided, complex_numbers, lazy, sparse, quantized, float8),
            *(meta, subclass, wrapped, recurrent, jagged, nested, without_gradients, inference, inference_saved),
            *(
                autocast,
                checkpointed,
                vmapped,
                gradient_inside,
                functional_gradient,
                counts,
                rebinds,
                moves_in_place,
                saves_what_moves,
            ),
            *(appends, tracks, closes_over, keeps_graph, draws, drops, skips, address, raises, reshapes, fails),
        )
    },
}
OPAQUE = ("address", "raises", "reshapes", "wrapped")
