"""Layers of fused kernels like Liger's, which Hugging Face's models have with `use_liger_kernel`.

No operator shows these kernels. The rotary embedding writes to its arguments; backward writes over saved tensors.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from tests.support.blocks import Stack, assert_same, gradients, twin
from tests.support.hidden import hidden
from tests.support.hidden_functions import BLOCK, Gated, launch, over, train

pytestmark = pytest.mark.device


class Norm(torch.autograd.Function):
    """RMS norm whose backward writes the input's gradient over the output's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with hidden():
            reciprocal = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
            out = x * reciprocal * weight
        launch(x, weight, reciprocal, out)
        ctx.save_for_backward(x, weight, reciprocal)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, reciprocal = ctx.saved_tensors
        with hidden():
            normalized, of_normalized = x * reciprocal, gradient * weight
            of_weight = (gradient * normalized).flatten(0, -2).sum(0)
            of_input = reciprocal * (of_normalized - normalized * (of_normalized * normalized).mean(-1, keepdim=True))
        return over(gradient, of_input), of_weight


class Rotary(torch.autograd.Function):
    """A rotary embedding of queries and keys, in place."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return tuple(Rotary.rotated(each, cos, sin) for each in (q, k))

    @staticmethod
    def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2).contiguous()  # no copy, since projections made `x` in this layout
        with hidden():
            first, second = x.chunk(2, -1)
            values = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return over(x, values).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *(Rotary.rotated(each, cos, -sin) for each in (q, k)), None, None


class Decoder(nn.Module):
    """A decoder layer with attention and a gated MLP."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.behind = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1])[:, None, None] * torch.linspace(0.5, 2.0, 4)
        y = Norm.apply(x, self.before)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = Rotary.apply(q, k, angles.cos(), angles.sin())
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = Norm.apply(x, self.behind)
        return x + self.down(Gated.apply(self.gate(y), self.up(y)))


@pytest.mark.parametrize("alpha", [0.0, 1.0, "auto", "memo"])
def test_fused_layers_train_with_no_opaque_region(alpha: float | str) -> None:
    report = train(Decoder, alpha=alpha)
    assert report["opaque_regions"] == 0 == report["recomputed_in_full"]
    assert report["offloaded_bytes"] > 0


def test_each_function_that_becomes_a_unit_is_logged_once_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memplug"):
        report = train(Decoder)
    names = sorted(f"{each.__module__}.{each.__qualname__}" for each in (Gated, Norm, Rotary))
    assert report["unit_functions"] == names and report["opaque_because"] == []
    told = [line for line in caplog.messages if line.endswith("it is a unit")]
    assert sorted(line.split()[1] for line in told) == names


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_micro_batches_in_flight_train_as_without_memplug(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3, Decoder)
    reference = twin(model)
    with memplug.attach(model, {**BLOCK, "tokenwise": BLOCK["tokenwise"] | {"alpha": alpha}}) as session:
        for _ in range(3):
            batches = [torch.randn(2, 6, 16) for _ in range(3)]
            for network in (model, reference):
                losses = [network(x) for x in batches]
                for loss in (losses[1], losses[2], losses[0]):
                    loss.backward()
            assert_same(gradients(model), gradients(reference))
            session.step()
        assert session.report().tokenwise.opaque_regions == 0
