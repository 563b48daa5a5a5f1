"""Steps that were measured on an H200 (tests/data/h200.csv), and the same ones on the virtual device."""

from __future__ import annotations

import csv
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memplug.device.virtual import Hardware, VirtualDevice
from tests.support.folders import ROOT
from tests.support.on_virtual.devices import H200, HIDDEN, TOKEN_HEADS, DecoderLayer

GIGABYTE = 1e9


@dataclass(frozen=True)
class Measured:
    """One step, forward and backward; `is_calibrated`: the profile was fitted to it."""

    tokens: int
    layers: int
    attention: str
    mode: str
    """All is kept, recomputed in full, or, "selective", all but attention is recomputed."""
    step_s: float
    peak_allocated_bytes: float
    peak_reserved_bytes: float | None
    is_calibrated: bool

    def __str__(self) -> str:
        return f"{self.tokens} x {self.layers}, {self.attention}, {self.mode}"


@dataclass(frozen=True)
class Predicted:
    """The same, of the virtual device."""

    step_s: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def measured() -> list[Measured]:
    """All steps of the layer that `DecoderLayer` is."""
    with open(ROOT / "tests" / "data" / "h200.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["layer"] == "layers.py"]
    return [
        Measured(
            tokens=int(row["tokens"]),
            layers=int(row["layers"]),
            attention=row["attention"],
            mode=row["mode"],
            step_s=float(row["step_s"]),
            peak_allocated_bytes=float(row["peak_allocated_gb"]) * GIGABYTE,
            peak_reserved_bytes=float(row["peak_reserved_gb"]) * GIGABYTE if row["peak_reserved_gb"] else None,
            is_calibrated=row["use"] == "calibrate",
        )
        for row in rows
        if row["mode"] in ("keep", "full", "selective")
    ]


def predicted(row: Measured) -> Predicted:
    """Of the second step, as it was measured: gradients are there."""
    gc.collect()
    device = VirtualDevice(Hardware.read(H200), attention=row.attention)
    with torch.device("virtual"):
        layers = nn.ModuleList(DecoderLayer() for _ in range(row.layers)).to(torch.bfloat16)
        cos, sin = (torch.empty(row.tokens, HIDDEN // TOKEN_HEADS // 2, dtype=torch.bfloat16) for _ in range(2))
        inputs = torch.randn(1, row.tokens, HIDDEN, dtype=torch.bfloat16)
    run = _RUNS[row.mode]

    def step() -> float:
        x = inputs.detach().requires_grad_()
        for layer in layers:
            x = run(layer, x, cos, sin)
        x.backward(inputs)
        return device.synchronize()

    began_s = step()
    device.empty_cache()
    device.reset_peaks()
    step_s = step() - began_s
    memory = device.usage()
    return Predicted(step_s, memory.allocated_peak, memory.reserved_peak)


def _attention_is_saved(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_attention = operator is torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


_RUNS: dict[str, Callable[..., torch.Tensor]] = {
    "keep": lambda layer, *args: layer(*args),
    "full": functools.partial(checkpoint, use_reentrant=False),
    "selective": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, _attention_is_saved),
    ),
}
