"""Steps of random layers in modes of every kind, with inner gradients, with transforms, and with custom functions."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from tests.support.random_layers import Layer


class Cubes(torch.autograd.Function):
    """A custom autograd function of the model."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


class Squares(torch.autograd.Function):
    """Computes without torch's operators."""

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


class Doubles(torch.autograd.Function):
    """Writes to its input, and keeps a tensor without autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.factor = torch.full_like(x, 2.0)
        ctx.mark_dirty(x)
        return x.mul_(ctx.factor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.factor


class FunctionMode(TorchFunctionMode):
    """Calls each function unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    """Calls each operator unchanged."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# -- modes -------------------------------------------------------------------------------------------------------------


def without_gradients(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = layer.other(y).softmax(-1)
    return y * scale


def gradients_again(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = layer.other(y).softmax(-1)
        with torch.enable_grad():
            y = y * layer.other(scale).sin()
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


def autocast_off(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return layer.other(y.to(layer.other.weight.dtype)).sin()


def function_mode(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with FunctionMode():
        return layer.other(y).sin()


def dispatch_mode(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with DispatchMode():
        return layer.other(y).sin()


def hooks_inside(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 1, lambda packed: packed):
        return layer.other(y).sin()


def saves_on_cpu(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return layer.other(y).sin()


def without_hooks(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        return y + 1


def checkpointed(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda z: layer.other(z).sin(), y, use_reentrant=False)


def reentrant(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda z: layer.other(z).sin(), y, use_reentrant=True)


def in_thread(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return y * pool.submit(lambda: layer.other(y.detach()).sin().detach()).result()


# -- transforms and gradients inside -----------------------------------------------------------------------------------


def vmapped(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row.sin() * row)(y)


def vmapped_weights(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    weights = torch.stack([layer.linear.weight, layer.other.weight])
    return torch.vmap(lambda weight, z: F.linear(z, weight).sin(), (0, None))(weights, y).sum(0)


def vmapped_without_gradients(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = torch.vmap(lambda row: (row.sin() * row).softmax(-1))(y)
    return y * scale


def vmapped_writes(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    made = layer.other(y)

    def scaled(row: torch.Tensor) -> torch.Tensor:
        layer.count.add_(1)
        return row * layer.count

    with torch.no_grad():
        scale = torch.vmap(scaled)(y)
        torch.vmap(lambda row: row.mul_(2))(made)
    return made * scale


def vmapped_random(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: F.dropout(row, 0.3) * row, randomness="different")(y)


def vmapped_gradient(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.func.grad(lambda row: (row.sin() ** 2).sum()))(y)


def functional_gradient(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda z: (z.sin() ** 2).sum())(y)


def pushed_forward(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(lambda z: layer.other(z).sin(), (y,), (torch.ones_like(y),))[1]


def dual(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        made = layer.other(forward_ad.make_dual(y, torch.ones_like(y))).sin()
        tangent = forward_ad.unpack_dual(made).tangent
    return y * tangent


def gradient_inside(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    energy = layer.other(y).sin().sum()
    return torch.autograd.grad(energy, y, create_graph=True)[0]


def gradient_of_leaf(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    leaf = y.detach().requires_grad_()
    return y * torch.autograd.grad(layer.other(leaf).sin().sum(), leaf)[0]


def batched_gradient(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    leaf = y.detach().requires_grad_()
    each = torch.eye(y.shape[-1]).view(-1, 1, 1, y.shape[-1]).expand(-1, *y.shape)
    (rows,) = torch.autograd.grad(layer.other(leaf).sin(), leaf, each, is_grads_batched=True)
    return y * rows.sum(0)


def accumulates(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    layer.other(y.detach()).sin().sum().backward()
    return y


def hooked(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    y = y * 1
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y.sin()


# -- functions of the model's own --------------------------------------------------------------------------------------


def own_function(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return Cubes.apply(y.sigmoid())


def own_kernel(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return Squares.apply(y.sigmoid())


def own_in_place(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return Doubles.apply(y * 1).sin()


STEPS = (
    *(without_gradients, gradients_again, inference, inference_saved, autocast, autocast_off, function_mode),
    *(dispatch_mode, hooks_inside, saves_on_cpu, without_hooks, checkpointed, reentrant, in_thread, vmapped),
    *(
        vmapped_weights,
        vmapped_without_gradients,
        vmapped_writes,
        vmapped_random,
        vmapped_gradient,
        functional_gradient,
    ),
    *(pushed_forward, dual, gradient_inside, gradient_of_leaf, batched_gradient, accumulates, hooked),
    *(own_function, own_kernel, own_in_place),
)
