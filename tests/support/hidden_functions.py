"""Trains layers that call custom autograd functions with kernels of their own, beside the same without memplug."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import memplug
from tests.support.blocks import LAYERS, Stack, assert_same, gradients, twin

BLOCK = {
    "enabled": True,
    "plan_dir": False,
    "arena": {"enabled": False},
    "tokenwise": {"regions": LAYERS, "alpha": 1.0, "min_offload_bytes": 1},
}
ran: list[str] = []
"""Names of the functions that ran."""


def train(layer: type[nn.Module], steps: int = 4, **tokenwise: Any) -> dict[str, Any]:
    """The report of a training whose gradients are those without memplug, from the first step on."""
    torch.manual_seed(0)
    model = Stack(3, layer)
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
            session.step()
        return {**session.report(), "ran": {name: counted.count(name) for name in set(counted)}}
