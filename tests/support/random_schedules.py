"""Kinds of training steps, each with its own order of forwards and backwards."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

Losses = list[torch.Tensor]


def _plain(model: nn.Module, x: torch.Tensor) -> Losses:
    loss = model(x)
    loss.backward()
    return [loss]


def _micro_batches(model: nn.Module, x: torch.Tensor) -> Losses:
    losses = [model(x), model(x * 2)]
    for loss in losses:
        loss.backward()
    return losses


def _reversed(model: nn.Module, x: torch.Tensor) -> Losses:
    losses = [model(x), model(x * 2)]
    for loss in reversed(losses):
        loss.backward()
    return losses


def _twice(model: nn.Module, x: torch.Tensor) -> Losses:
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def _in_parts(model: nn.Module, x: torch.Tensor) -> Losses:
    loss = model(x)
    last = [p for p in model.parameters() if p.requires_grad][-2:]
    grads = torch.autograd.grad(loss, last, retain_graph=True, allow_unused=True)
    loss.backward()
    return [loss, *(grad for grad in grads if grad is not None)]


def _asked(model: nn.Module, x: torch.Tensor) -> Losses:
    loss = model(x)
    weights = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad
    return [loss]


def _penalized(model: nn.Module, x: torch.Tensor) -> Losses:
    x.requires_grad_()
    loss = model(x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()
    return [loss, grad.detach()]


def _batched(model: nn.Module, x: torch.Tensor) -> Losses:
    x.requires_grad_()
    losses = torch.stack([model(x), model(x * 2)])
    (grads,) = torch.autograd.grad(
        losses, x, torch.eye(2, device=x.device, dtype=x.dtype), is_grads_batched=True, retain_graph=True
    )
    losses.sum().backward()
    return [losses, grads]


def _batched_by_function(model: nn.Module, x: torch.Tensor) -> Losses:
    x.requires_grad_()
    losses = torch.stack([model(x), model(x * 2)])
    rows = torch.eye(2, device=x.device, dtype=x.dtype)
    grads = torch.func.vmap(lambda row: torch.autograd.grad(losses, x, row, retain_graph=True)[0])(rows)
    losses.sum().backward()
    return [losses, grads]


def _evaluated(model: nn.Module, x: torch.Tensor) -> Losses:
    loss = model(x)
    model.eval()
    with torch.no_grad():
        other = model(x * 2)
    loss.backward()
    model.train()
    return [loss, other]


def _inferred(model: nn.Module, x: torch.Tensor) -> Losses:
    with torch.inference_mode():
        other = model(x * 2)
    return [*_plain(model, x), other]


def _dropped(model: nn.Module, x: torch.Tensor) -> Losses:
    return [model(x).detach(), *_plain(model, x * 2)]


def _larger(model: nn.Module, x: torch.Tensor) -> Losses:
    return _plain(model, torch.cat([x, x * 2]))


def _smaller(model: nn.Module, x: torch.Tensor) -> Losses:
    return _plain(model, x[:1])


def _vmapped(model: nn.Module, x: torch.Tensor) -> Losses:
    losses = torch.vmap(model, randomness="different")(torch.stack([x, x * 2]))
    losses.sum().backward()
    return [losses, *_plain(model, x)]


def _transformed(model: nn.Module, x: torch.Tensor) -> Losses:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    grads = torch.func.grad(lambda each: torch.func.functional_call(model, each, (x,)))(weights)
    return [*grads.values(), *_plain(model, x)]


def _pushed_forward(model: nn.Module, x: torch.Tensor) -> Losses:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    return [tangent.detach(), *_plain(model, x)]


def _checkpointed(model: nn.Module, x: torch.Tensor) -> Losses:
    loss = checkpoint(model, x, use_reentrant=False)
    loss.backward()
    return [loss]


def _checkpointed_reentrant(model: nn.Module, x: torch.Tensor) -> Losses:
    loss = checkpoint(model, x.requires_grad_(), use_reentrant=True)
    loss.backward()
    return [loss]


def _in_thread(model: nn.Module, x: torch.Tensor) -> Losses:
    loss = model(x)
    errors: list[BaseException] = []

    def backward() -> None:
        try:
            loss.backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return [loss]


class _Interrupted(Exception):
    """An error that ends a backward."""


def _interrupted(model: nn.Module, x: torch.Tensor) -> Losses:
    x.requires_grad_().register_hook(_interrupt)
    loss = model(x)
    with contextlib.suppress(_Interrupted):
        loss.backward()
    return [loss, *_plain(model, x.detach() * 2)]


def _interrupt(grad: torch.Tensor) -> None:
    raise _Interrupted


def _write_biases(model: nn.Module) -> None:
    """Write to parameters that autograd does not save."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.bias.add_(1)


def _written_between(model: nn.Module, x: torch.Tensor) -> Losses:
    loss = model(x)
    _write_biases(model)
    loss.backward()
    return [loss]


def _written_between_backwards(model: nn.Module, x: torch.Tensor) -> Losses:
    losses = [model(x), model(x * 2)]
    losses[0].backward()
    _write_biases(model)
    losses[1].backward()
    return losses


def _stepped_in_backward(model: nn.Module, x: torch.Tensor) -> Losses:
    def step(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.01)

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters() if p.requires_grad]
    try:
        return _plain(model, x)
    finally:
        for handle in handles:
            handle.remove()


SCHEDULES: dict[str, Any] = {
    schedule.__name__[1:].replace("_", " "): schedule
    for schedule in (
        *(_plain, _micro_batches, _reversed, _twice, _in_parts, _asked, _penalized, _batched, _batched_by_function),
        *(_evaluated, _inferred, _dropped, _larger, _smaller, _vmapped, _transformed, _pushed_forward, _checkpointed),
        *(_checkpointed_reentrant, _in_thread, _interrupted, _stepped_in_backward),
        *(_written_between, _written_between_backwards),
    )
}
