"""Trains layers that call custom autograd functions with kernels of their own, beside the same without memplug."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import memplug
from tests.support.blocks import LAYERS, Layer, Stack, assert_same, gradients, twin
from tests.support.hidden import hidden

BLOCK = {
    "enabled": True,
    "plan_dir": False,
    "arena": {"enabled": False},
    "tokenwise": {"regions": LAYERS, "alpha": 1.0, "min_offload_bytes": 1},
}
ran: list[str] = []
"""Names of the functions that ran."""


def train(
    layer: type[nn.Module] = Layer, steps: int = 4, network: type[nn.Module] | None = None, **tokenwise: Any
) -> dict[str, Any]:
    """The report of a training whose gradients and buffers are those without memplug, from the first step on.

    Args:
        layer: of which a `Stack` has three.
        network: in place of that.
    """
    torch.manual_seed(0)
    model = Stack(3, layer) if network is None else network()
    reference = twin(model)
    with memplug.attach(model, {**BLOCK, "tokenwise": BLOCK["tokenwise"] | tokenwise}) as session:
        for _ in range(steps):
            x, seed = torch.randn(2, 6, 16), torch.get_rng_state()
            ran.clear()
            model(x).backward()
            counted = list(ran)
            torch.set_rng_state(seed)
            reference(x).backward()
            assert_same(gradients(model), gradients(reference))
            assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
            session.step()
        return {**session.report().as_dict(), "ran": {name: counted.count(name) for name in set(counted)}}


def launch(*tensors: torch.Tensor) -> None:
    """A kernel is given the addresses of tensors, as Triton's are."""
    for tensor in tensors:
        tensor.data_ptr()


def over(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A kernel that was given the tensor's address wrote values there."""
    launch(tensor)
    with hidden():
        tensor.data.copy_(values)
    return tensor


class Gated(torch.autograd.Function):
    """SiLU of one times the other. Their gradients lie where they were saved."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        with hidden():
            out = torch.nn.functional.silu(gate) * up
        launch(gate, up, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        with hidden():
            chance = gate.sigmoid()
            of_up = gradient * gate * chance
            of_gate = gradient * up * chance * (1 + gate * (1 - chance))
        return over(gate, of_gate), over(up, of_up)


def written(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    """A kernel that was given the tensor's address multiplied its memory, and no version tells of that."""
    ran.append("written")
    x.data_ptr()
    with hidden():
        x.data.mul_(factor)
    return x


class Unsaid(torch.autograd.Function):
    """Tells nobody."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return written(x.contiguous()).view_as(x)  # contiguous it is

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Pairs(nn.Module):
    """Runs two kinds of regions by turns, the second on the two tensors that the first gives."""

    first: type[nn.Module]
    second: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList([self.first(), self.second(), self.first(), self.second()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for made, written in ((0, 1), (2, 3)):
            x = self.layers[written](*self.layers[made](x))
        return x.square().mean()
