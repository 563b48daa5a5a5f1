"""Layers whose forwards ask for gradients themselves: forces, training at test time, losses by tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.blocks import Layer


class Force(Layer):
    """A layer whose output contains the gradient of an energy, with a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x))
        (force,) = torch.autograd.grad(y.sin().sum(), y, create_graph=True)
        return x + self.out(force)


class KeepsGraph(Layer):
    """A layer that asks twice for a gradient through one graph; the gradients have no graph of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        y = self.inner(given).tanh()
        for _ in range(2):
            (gradient,) = torch.autograd.grad(y.square().sum(), given, retain_graph=True)
            x = x + 0.1 * gradient
        return x + self.out(y)


class LearnsInside(Layer):
    """A layer that trains at test time: backward goes through steps of gradient descent on a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        for _ in range(2):
            (gradient,) = torch.autograd.grad(F.linear(x, weight).tanh().square().mean(), weight, create_graph=True)
            weight = weight - 0.1 * gradient
        return x + self.out(F.linear(x, weight))


class Accumulates(Layer):
    """A layer whose forward runs a backward of its own, which accumulates gradients of its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        target = y.detach().requires_grad_()
        self.out(target).square().sum().backward()
        return x + self.out(y * target.grad)


class Checkpoints(Layer):
    """A layer that asks for the gradient of a checkpointed part, which has to be recomputed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        y = checkpoint(lambda part: self.inner(part).tanh().sin(), given, use_reentrant=False)
        (gradient,) = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        return x + gradient


class ByTiles(torch.autograd.Function):
    """A loss whose forward computes the gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            given = [each.detach().requires_grad_() for each in (x, weight)]
            loss = F.linear(*given).tanh().square().mean()
            ctx.save_for_backward(*torch.autograd.grad(loss, given))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(gradient * each for each in ctx.saved_tensors)


class Tiles(Layer):
    """A layer that multiplies its input by the loss of `ByTiles`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * ByTiles.apply(self.norm(x), self.inner.weight)


class Jacobian(Layer):
    """A layer that uses torch's own Jacobian, with a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.functional.jacobian(lambda y: self.inner(y).tanh().sum((0, 1)), x, create_graph=True)
        return x + found.sum(0)


class BatchedJacobian(Layer):
    """A layer whose Jacobian is computed for all rows at once, under vmap."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.functional.jacobian(
            lambda y: self.inner(y).tanh().sum((0, 1)), x, create_graph=True, vectorize=True
        )
        return x + found.sum(0)


class Hessian(Layer):
    """A layer that uses the product of a Hessian and a vector."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.autograd.functional.hvp(lambda y: self.inner(y).tanh().sum(), x, x, create_graph=True)[1]


ASKING = [Force, KeepsGraph, LearnsInside, Accumulates, Checkpoints, Tiles, Jacobian, BatchedJacobian, Hessian]


class Sometimes(Layer):
    """A layer that asks for a gradient only while `asks` is set."""

    asks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).tanh()
        if Sometimes.asks:
            y = y * torch.autograd.grad(y.square().sum(), y, retain_graph=True)[0]
        return x + self.out(y.sin())


class Draws(Sometimes):
    """A layer that draws random numbers, writes in place and to a buffer, and asks for two gradients.

    The first of the two gradients has a graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        y = F.dropout(self.inner(given), 0.3).relu_()
        y = y - self.mean
        self.mean.mul_(0.5).add_(y.detach().mean((0, 1)))
        y = (y - self.mean).tanh() * y.exp()
        if Sometimes.asks:
            (gradient,) = torch.autograd.grad(y.square().sum(), given, create_graph=True)
            x = x + 0.1 * F.dropout(gradient, 0.3)
            x = x + 0.1 * torch.autograd.grad(x.square().sum(), given, retain_graph=True)[0]
        return x + self.out(y.sin())


class Forks(Sometimes):
    """A layer that saves halves of a tensor, writes in place, and asks for gradients of parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        y = self.inner(self.norm(x.clone()))
        x.mul_(0.5).sin_()
        z = y.chunk(2, -1)[1].sigmoid() * x.cos()
        if Sometimes.asks:
            gradients = torch.autograd.grad(z.square().sum(), [self.inner.weight, y], create_graph=True)
            z = z * gradients[0].square().sum() + gradients[1].chunk(2, -1)[1]
        return x + z


class Tells(Sometimes):
    """A layer that takes a tensor's address, so that the region is opaque."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.data_ptr()
        return super().forward(x)


class Accumulating(Sometimes):
    """A layer whose forward, while `asks` is set, runs a backward that accumulates gradients of its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).tanh()
        if Sometimes.asks:
            target = y.detach().requires_grad_()
            self.out(target.sin()).square().sum().backward()
            y = y * target.grad
        return x + self.out(y.sin())


BEGINNING = [Sometimes, Draws, Forks, Tells, Accumulating]
