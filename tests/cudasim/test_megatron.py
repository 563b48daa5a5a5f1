"""Megatron-Core on simulated CUDA, in two processes: with memplug, gradients and losses are the same to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import launch

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.distributed, pytest.mark.long]

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor and sequence": {"tensor": 2, "sequence": True, "micro_batches": 2, "steps": 4},
    "pipeline": {"pipeline": 2, "micro_batches": 4, "steps": 4},
}


def block(alpha: float, arena: bool) -> dict[str, Any]:
    """Return a block that swaps even the smallest tensor."""
    return {
        "enabled": True,
        "plan_dir": False,
        "profiler": {"warmup_steps": 1, "policy_steps": 0},
        "tokenwise": {"alpha": alpha, "min_offload_bytes": 1},
        "arena": {"enabled": arena},
    }


CASES = {
    "without": (None, ("eager", 0)),
    "0.5, lazy": (block(0.5, arena=True), ("lazy", 0)),
    "1, copyfirst": (block(1.0, arena=True), ("copyfirst", 0)),
    "0.5, computefirst": (block(0.5, arena=False), ("computefirst", 0)),
    "1, random": (block(1.0, arena=False), ("random", 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_training_is_unchanged_and_every_access_is_ordered(layout: str, tmp_path: Path) -> None:
    arguments = ["tests.cudasim.megatron_worker", tmp_path, json.dumps(LAYOUTS[layout]), json.dumps(CASES)]
    launch(arguments, module=True, time_limit_s=300)
    for rank in (0, 1):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, result in results.items():
            assert result["losses"] == results["without"]["losses"], name
            assert result["digests"] == results["without"]["digests"], name
            assert result["violations"] == 0, name
            if name != "without":
                assert result["report"]["offloaded_bytes"] > 0 and result["report"]["recomputed_in_full"] == 0, name
