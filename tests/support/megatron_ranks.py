"""Trains Megatron-Core on several processes, and compares their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forking import launch_forked
from tests.support.launching import launch

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")


MEMPLUG = {"enabled": True, "profiler": {"warmup_steps": 1, "policy_steps": 2}}
# rounding can change which experts a router chooses, and so the step; a small learning rate makes this rare
MIXTURE = {"experts": 8, "learning_rate": 1e-3}


def block(alpha: float | str, arena: bool) -> dict[str, Any]:
    """Return a block that swaps even the smallest tensor."""
    return {**MEMPLUG, "tokenwise": {"alpha": alpha, "min_offload_bytes": 1}, "arena": {"enabled": arena}}


def train(folder: Path, layout: dict[str, Any], cases: dict[str, Any], processes: int = 2) -> list[dict[str, Any]]:
    """Train all cases, and return each rank's results by case."""
    launch_forked(
        ["tests.support.megatron_worker", folder, json.dumps(layout), json.dumps(cases)],
        libraries="transformer_engine" if layout.get("transformer_engine") else "megatron",
        module=True,
        processes=processes,
        time_limit_s=300,
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]


def train_on_cuda(folder: Path, layout: dict[str, Any], cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Train all cases on one CUDA device, and return that rank's results by case."""
    arguments = ["tests.support.megatron_worker", folder, json.dumps({"device": "cuda", **layout}), json.dumps(cases)]
    launch(arguments, processes=1, module=True)
    return [torch.load(folder / "0.pt", weights_only=False)]


def relative_error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    ours, theirs = torch.cat([one.flatten() for one in ours]), torch.cat([one.flatten() for one in theirs])
    return ((ours - theirs).norm() / theirs.norm()).item()


AGREED = ("stage", "alpha_by_link", "alpha_by_host", "program", "programs", "replans", "swapped_share")
"""Fields of the report that are equal on all ranks."""


def assert_same(ours: dict[str, Any], plain: dict[str, Any], exactly: bool) -> None:
    """Assert that losses of all micro-batches and gradients of all steps equal those of the run without memplug."""
    if exactly:
        assert ours["losses"] == plain["losses"] and ours["digests"] == plain["digests"]
    else:  # a matmul of only some rows rounds differently
        assert relative_error(ours["gradients"], plain["gradients"]) < 1e-5
        assert ours["losses"] == pytest.approx(plain["losses"], abs=2e-3)


def assert_sound(ranks: list[dict[str, Any]]) -> None:
    """Assert that the reports of one case are sound and agree between ranks."""
    for rank in ranks:
        report = rank["report"]
        assert report["opaque_regions"] == report["recomputed_in_full"] == 0
        assert report["offloaded_bytes"] > 0 and report["stage"] == "stable"
        assert rank["history"] == ranks[0]["history"] and rank["shares"] == ranks[0]["shares"]
        assert {key: report[key] for key in AGREED} == {key: ranks[0]["report"][key] for key in AGREED}
