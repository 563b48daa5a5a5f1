"""The estimators of `memplug tune`, compared with whole models that train on the virtual device."""

from __future__ import annotations

import dataclasses
import functools
import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplug
from memplug.predict.estimator.shapes import Shape
from memplug.predict.tune.estimate import StepEstimator
from memplug.predict.tune.machine import Machine
from memplug.predict.tune.profiled import profile
from memplug.predict.tune.search import Configuration, StepLayout
from memplug.predict.virtual import GpuProfile, VirtualDevice
from tests.support.folders import ROOT


@dataclass(frozen=True)
class Case:
    """One GPU, and how many blocks of a model swap and checkpoint."""

    gpu: str
    model: str
    layers: int
    seq_len: int
    micro_batch: int
    swap: int
    checkpoint: int
    accumulation: int = 1

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in dataclasses.fields(self))


CASES = [
    Case("h100", "7b", 8, 4096, 1, 0, 0),
    Case("h100", "7b", 8, 4096, 4, 0, 4),
    Case("h100", "7b", 8, 4096, 4, 0, 8),
    Case("h100", "7b", 4, 4096, 8, 0, 2, 3),
    Case("h200", "13b", 6, 16384, 1, 0, 0),
    Case("h200", "13b", 6, 65536, 1, 0, 6),
    Case("h200", "70b", 3, 32768, 1, 0, 1),
    Case("a100", "7b", 6, 32768, 1, 0, 5),
    Case("4090", "7b", 3, 2048, 4, 0, 0),
    Case("4090", "7b", 3, 2048, 16, 0, 3),
    Case("h200", "7b", 8, 32768, 1, 4, 0),
    Case("h200", "7b", 8, 32768, 1, 4, 4),
    Case("h100", "qwen3_8b", 4, 8192, 2, 0, 2),
]


def shape_of(case: Case) -> Shape:
    fields = yaml.safe_load((ROOT / "configs" / "models" / f"{case.model}.yaml").read_text())
    return Shape({**fields, "num_hidden_layers": case.layers})


def hardware_of(case: Case) -> GpuProfile:
    return GpuProfile.read(ROOT / "configs" / "hardware" / f"{case.gpu}.json")


def predicted(case: Case) -> tuple[float, int]:
    """Return a step's predicted seconds and bytes under ZeRO 1 on one rank."""
    hardware = hardware_of(case)
    profiles = {case.micro_batch: profile(hardware, shape_of(case), case.micro_batch, case.seq_len)}
    layout = StepLayout(stage=1, offload="none", micro_batch=case.micro_batch, accumulation=case.accumulation)
    estimator = StepEstimator(Machine(hardware=hardware, gpus=1), profiles)
    at = Configuration(layout=layout, n_persist=1, n_buffer=1, n_swap=case.swap, n_checkpoint=case.checkpoint)
    chunks = len(estimator.chunks(layout))
    made = estimator.predict(dataclasses.replace(at, n_persist=chunks, n_buffer=chunks))
    return made.step_s, made.device_bytes


class MixedPrecision:
    """Adam as in ZeRO 1 on one rank: master weights in one tensor; during a step, also a copy of the gradients."""

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())
        self.master = torch.zeros(sum(each.numel() for each in self.parameters), device="virtual")
        self.adam = torch.optim.AdamW([self.master], lr=1e-4, fused=True)

    def step(self) -> None:
        self.master.grad = torch.empty_like(self.master)
        sizes = [each.numel() for each in self.parameters]
        for part, each in zip(self.master.grad.split(sizes), self.parameters, strict=True):
            part.copy_(each.grad.view(-1))
        self.adam.step()
        self.master.grad = None
        for part, each in zip(self.master.split(sizes), self.parameters, strict=True):
            each.data.view(-1).copy_(part)
            each.grad = None


def trained(case: Case) -> tuple[float, int]:
    """Return seconds and peak bytes of a whole model's step on the virtual device, with memplug if blocks swap."""
    device = VirtualDevice(hardware_of(case), expandable_segments=True, bounded=False)
    gc.collect()
    before = device.usage().allocated
    model = _model(shape_of(case))
    for layer in [model.model.layers[index] for index in checkpointed(case)]:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    ids = torch.zeros(case.micro_batch, case.seq_len, dtype=torch.long, device="virtual")
    optimizer = MixedPrecision(model)
    session = memplug.attach(model, swapping(case)) if case.swap else None
    for _ in range(3 if session is None else 8):
        began_s = device.synchronize()
        device.reset_peaks()
        for _ in range(case.accumulation):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        if session is not None:
            session.step()
        step_s = device.synchronize() - began_s
    peak = device.usage().allocated_peak - before
    if session is not None:
        session.detach()
    return step_s, peak


def swapped(case: Case) -> list[int]:
    """Return the blocks that swap: evenly spread, so that other blocks compute during the copies of one block."""
    return [index * case.layers // case.swap for index in range(case.swap)]


def checkpointed(case: Case) -> list[int]:
    """Return the blocks that checkpoint: the first blocks among the ones that do not swap."""
    return [index for index in range(case.layers) if index not in swapped(case)][: case.checkpoint]


def swapping(case: Case) -> dict[str, Any]:
    regions = [f"model.layers.{index}" for index in swapped(case)]
    return {
        "enabled": True,
        "plan_dir": False,
        "host_budget_gib": 2000,
        "arena": {"enabled": False},
        "tokenwise": {"alpha": 1, "regions": regions},
        "profiler": {"wait_for_plans": True},
    }


def _model(shape: Shape) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{shape.family}Config")(**shape.fields, use_cache=False)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("virtual"):
            return getattr(transformers, f"{shape.family}ForCausalLM")(config).train()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tune_prediction_matches_a_step_of_the_whole_model(case: Case) -> None:
    ours_s, ours_bytes = predicted(case)
    step_s, peak_bytes = trained(case)
    assert ours_s == pytest.approx(step_s, rel=0.05)
    assert 0.98 * peak_bytes <= ours_bytes <= 1.1 * peak_bytes
