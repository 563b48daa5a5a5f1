"""Trains layers that call custom autograd functions with kernels of their own, beside the same without memplug."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import memplug
from tests.support.blocks import LAYERS, Layer, Stack, assert_same, gradients, twin

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
