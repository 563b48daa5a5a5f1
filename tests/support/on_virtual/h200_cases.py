"""What the virtual device says of steps that were measured on an H200."""

from __future__ import annotations

import csv
import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memplug.device.virtual import Hardware, VirtualDevice
from tests.support.folders import ROOT
from tests.support.on_virtual.devices import H200, HIDDEN, TOKEN_HEADS, DecoderLayer


def _measured() -> list[SimpleNamespace]:
    with open(ROOT / "tests" / "data" / "h200.csv") as file:
        rows = [SimpleNamespace(**row) for row in csv.DictReader(file)]
    return [
        row for row in rows if row.layer == "layers.py" and row.attention == "cudnn" and row.mode in ("keep", "full")
    ]


@pytest.mark.parametrize("row", _measured(), ids=lambda row: f"{row.tokens}-{row.layers}-{row.mode}")
def test_a_step_takes_what_it_took_on_an_h200(row: SimpleNamespace) -> None:
    gc.collect()
    device = VirtualDevice(Hardware.read(H200))
    tokens, gigabyte = int(row.tokens), 1e9
    with torch.device("virtual"):
        layers = nn.ModuleList(DecoderLayer() for _ in range(int(row.layers))).to(torch.bfloat16)
        cos, sin = (torch.empty(tokens, HIDDEN // TOKEN_HEADS // 2, dtype=torch.bfloat16) for _ in range(2))
        inputs = torch.randn(1, tokens, HIDDEN, dtype=torch.bfloat16)

    def step() -> None:
        x = inputs.detach().requires_grad_()
        for layer in layers:
            x = layer(x, cos, sin) if row.mode == "keep" else checkpoint(layer, x, cos, sin, use_reentrant=False)
        x.backward(inputs)

    step()
    began = device.synchronize()
    device.empty_cache()
    device.reset_peaks()
    step()
    assert device.synchronize() - began == pytest.approx(float(row.step_s), rel=0.09)
    memory = device.usage()
    assert memory.allocated_peak / gigabyte == pytest.approx(float(row.peak_allocated_gb), rel=0.015)
    if row.peak_reserved_gb:
        assert memory.reserved_peak / gigabyte == pytest.approx(float(row.peak_reserved_gb), rel=0.04)
