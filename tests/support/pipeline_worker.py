"""Trains a pipeline of two DeepSpeed stages, whose layers memplug does not know, once for each of several blocks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import memplug
from memplug.errors import RegionError
from tests.support.blocks import Block
from tests.support.hosts import block, ds_config, make_engine

STEPS = 8


def train(config: dict[str, Any] | None) -> dict[str, Any]:
    """Return this rank's losses, its stage's weights, and memplug's stage and regions, or its refusal."""
    torch.manual_seed(0)
    module = PipelineModule(
        [LayerSpec(nn.Linear, 16, 16), *[LayerSpec(Block)] * 5, LayerSpec(nn.Linear, 16, 16)],
        num_stages=2,
        partition_method="uniform",
        loss_fn=lambda y, target: (y - target).square().mean(),
    )
    engine = make_engine(ds_config(0, config, gradient_accumulation_steps=2), module)
    session = None
    if config is not None:
        try:
            session = memplug.attach(engine)
        except RegionError as error:
            return {"refused": str(error)}
    batches = iter(torch.randn(2 * STEPS, 2, 2, 6, 16, generator=torch.Generator().manual_seed(1)))
    losses = [engine.train_batch(batches).item() for _ in range(STEPS)]
    found = {"losses": losses, "weights": [weight.double().sum().item() for weight in module.parameters()]}
    if session is not None:
        report = session.report()
        regions = [region.name for region in session._attached.regions]
        found |= {"stage": session.stage.value, "regions": regions, "alone": report.planning_stopped_because}
        session.detach()
    return found


def main() -> None:
    """Write this rank's results by case into the folder on the command line."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for half a minute
    deepspeed.init_distributed(dist_backend="gloo")
    cases = {
        "plain": None,
        "auto": block(),
        "one stage": block(regions=["1", "2"]),
        "one stage, alpha": block(regions=["1", "2"], alpha=0.0),
        "memo": block(regions=["1"], alpha="memo"),
        "all": block(regions=["*"], alpha=1.0),
        "none": block(regions=["1", "9"]),
    }
    results = {name: train(config) for name, config in cases.items()}
    rank = torch.distributed.get_rank()
    Path(sys.argv[-1], f"{rank}.json").write_text(json.dumps(results))
