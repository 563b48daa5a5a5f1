"""The memory of a prefetched tensor belongs to the layer that offloaded it, whichever layer's backward runs."""

from __future__ import annotations

import torch

import memplug
from memplug.profile.trace import Pass, Trace
from tests.support.blocks import LAYERS, Stack


def recorded(micro_batches: int) -> Trace:
    """Return a recorded step in which each layer offloads its saved tensors."""
    model = Stack(layers=5)
    settings = {"alpha": 1.0, "regions": LAYERS, "min_offload_bytes": 1}
    block = {"enabled": True, "plan_dir": False, "tokenwise": settings, "profiler": {"warmup_steps": 1}}
    with memplug.attach(model, block) as session:
        for _ in range(6):
            session.record()
            for _ in range(micro_batches):
                model(torch.randn(2, 6, 16)).backward()
            session.step()
        assert session.trace is not None
        return session.trace


def test_prefetched_memory_belongs_to_the_layer_that_offloaded() -> None:
    trace = recorded(micro_batches=2)
    rows = trace.requests
    prefetched = [row for row in rows if trace.phases[row["malloc_phase"]].kind is Pass.PREFETCH]
    assert len(prefetched) >= 2 * 3, "at least one tensor of three layers in each micro-batch"
    for row in prefetched:
        asked, freed = trace.phases[row["malloc_phase"]], trace.phases[row["free_phase"]]
        assert freed.kind is Pass.BACKWARD and freed.micro_batch == asked.micro_batch
        assert trace.layers[row["malloc_layer"]].name.startswith("layers.")
        assert row["malloc_layer"] == row["free_layer"]
    layers = {int(row["malloc_layer"]) for row in prefetched}
    assert len(layers) >= 3
