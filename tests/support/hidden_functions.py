"""Trains layers that call custom autograd functions with hidden kernels, and compares them with plain torch."""

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
    """Train with memplug, compare gradients and buffers with plain torch in every step, and return the report.

    The report's added field "ran" counts the functions that ran in the last step, by name.

    Args:
        layer: the class of the three layers of a `Stack`.
        steps: number of steps.
        network: the class of the model, in place of a `Stack`.
        **tokenwise: settings of the block's "tokenwise" section.
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
    """Take the addresses of tensors, as a launch of a Triton kernel does."""
    for tensor in tensors:
        tensor.data_ptr()


def over(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Overwrite a tensor through its address, as a kernel does."""
    launch(tensor)
    with hidden():
        tensor.data.copy_(values)
    return tensor


class Gated(torch.autograd.Function):
    """SiLU of one tensor times the other; backward writes their gradients over the saved tensors."""

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
    """Multiply a tensor in place through its address, as a kernel does: the tensor's version stays the same."""
    ran.append("written")
    x.data_ptr()
    with hidden():
        x.data.mul_(factor)
    return x


class Unsaid(torch.autograd.Function):
    """A function that writes to its input without calling `mark_dirty`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return written(x.contiguous()).view_as(x)  # x is contiguous already, so this writes to x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Pairs(nn.Module):
    """Runs regions of two kinds in turn: `first` returns two tensors, which `second` gets."""

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
