"""Steps that were measured on an H200 (tests/data/h200.csv), and their predictions by the virtual device."""

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

from memplug.predict.estimator import modes
from memplug.predict.estimator.shapes import Shape
from memplug.predict.estimator.training import VirtualTraining
from memplug.predict.estimator.workload import Workload
from memplug.predict.virtual import GpuProfile, VirtualDevice
from tests.support.folders import ROOT
from tests.support.virtual_devices import H200, HIDDEN, TOKEN_HEADS, DecoderLayer

GIGABYTE = 1e9
OWN, LLAMA = "layers.py", "HF Llama, no head"
"""The kinds of layers that were measured: `DecoderLayer`, and those of Hugging Face's Llama."""
BY_DEFAULT = "sdpa default"
"""The attention back end in rows that did not record one: torch chose it."""


@dataclass(frozen=True)
class Measured:
    """One measured step, forward and backward; `is_calibrated`: the hardware profile was fitted to it."""

    layer: str
    """`OWN` or `LLAMA`."""
    tokens: int
    layers: int
    attention: str
    mode: str
    """"keep" keeps all, "full" recomputes all, "selective" recomputes all but attention."""
    step_s: float
    peak_allocated_bytes: float | None
    peak_reserved_bytes: float | None
    is_calibrated: bool

    def __str__(self) -> str:
        llama = "Llama, " if self.layer == LLAMA else ""
        return f"{llama}{self.tokens:,} × {self.layers}, {self.attention}, {self.mode}"


@dataclass(frozen=True)
class Predicted:
    """The same step as the virtual device predicts it."""

    step_s: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def measured() -> list[Measured]:
    """Return all measured steps of plain PyTorch whose layers can be built here."""

    def gigabytes(value: str) -> float | None:
        return float(value) * GIGABYTE if value else None

    with open(ROOT / "tests" / "data" / "h200.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["layer"] in (OWN, LLAMA)]
    return [
        Measured(
            layer=row["layer"],
            tokens=int(row["tokens"]),
            layers=int(row["layers"]),
            attention=row["attention"],
            mode=row["mode"],
            step_s=float(row["step_s"]),
            peak_allocated_bytes=gigabytes(row["peak_allocated_gb"]),
            peak_reserved_bytes=gigabytes(row["peak_reserved_gb"]),
            is_calibrated=row["use"] == "calibrate",
        )
        for row in rows
        if row["mode"] in _RUNS
    ]


def predicted(row: Measured) -> Predicted:
    """Predict the second step: gradients exist already, as in the measurement."""
    gc.collect()
    device = VirtualDevice(GpuProfile.read(H200), attention="cudnn" if row.attention == BY_DEFAULT else row.attention)
    step = _llama(row) if row.layer == LLAMA else _own(row)
    step()
    began_s = device.synchronize()
    device.empty_cache()
    device.reset_peaks()
    step()
    step_s = device.synchronize() - began_s
    memory = device.usage()
    return Predicted(step_s, memory.allocated_peak, memory.reserved_peak)


def _own(row: Measured) -> Callable[[], None]:
    with torch.device("virtual"):
        layers = nn.ModuleList(DecoderLayer() for _ in range(row.layers)).to(torch.bfloat16)
        cos, sin = (torch.empty(row.tokens, HIDDEN // TOKEN_HEADS // 2, dtype=torch.bfloat16) for _ in range(2))
        inputs = torch.randn(1, row.tokens, HIDDEN, dtype=torch.bfloat16)
    run = _RUNS[row.mode]

    def step() -> None:
        x = inputs.detach().requires_grad_()
        for layer in layers:
            x = run(layer, x, cos, sin)
        x.backward(inputs)

    return step


def _llama(row: Measured) -> Callable[[], None]:
    shape = Shape.read(ROOT / "configs" / "models" / "7b.yaml")
    workload = Workload(shape=shape, layers=row.layers, seq_len=row.tokens, head=False, optimizer=False)
    training = VirtualTraining(workload.make_model, workload.inputs)
    modes.recompute(training.model.layers, row.mode)
    return training.step


def _attention_is_saved(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_attention = operator.name().startswith("aten::_scaled_dot_product")
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
