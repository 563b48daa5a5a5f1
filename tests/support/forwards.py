"""Layers whose forwards call, read, write and return in every way that a region must support."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.blocks import Block, Layer


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
    """A mixture of experts in which rounding cannot change a token's expert."""

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
    """A mixture of experts that routes by a list of token counts on the host, as many models do."""

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
        factor = float((y.detach() * 2).cpu().numpy().max())
        return x + self.out((y / factor).sigmoid())


class WritesOutput(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return x + self.out(y.relu_().sigmoid())


class WritesAfterUse(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        z = y * 1.5  # reads y before the writes, and saves nothing of it
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
    """A layer that updates a buffer in place, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.detach().mean((0, 1)))
        return x + self.out((y + self.mean).sigmoid())


class Normalizes(Layer):
    """A layer with batch norm, which writes statistics to buffers although no operator's schema says so."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.batch_norm(self.inner(x).transpose(1, 2)).transpose(1, 2)
        return x + self.out(y.sigmoid())


class NormalizesAlike(Normalizes):
    """A layer with batch norm in evaluation mode, which uses the running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm.eval()


class Counts(Layer):
    """A layer whose buffer only counts, as load balancing of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.tokens += (y.detach() > 0).sum()
        return x + self.out(y.sigmoid())


class TwoReads(torch.autograd.Function):
    """Asks for its saved tensors several times, as many hand-written functions do."""

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
    """A function whose kernel is no operator of torch: it works on addresses, as Triton and pybind kernels do."""

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
    """A layer with batched products and every kind of bias."""

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
    Normalizes,
    NormalizesAlike,
    Counts,
    ReadsTwice,
    pytest.param(RunsInvisibleKernel, marks=pytest.mark.cpu("it writes by numpy")),
    Complex,
    Convolves,
    Expands,
    MultiplyAdds,
    Gathers,
    RunsRecurrently,
]
