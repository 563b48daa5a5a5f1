"""Two real processes with different budgets, under every stage of ZeRO: each swaps by a list of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking import launch_forked
from tests.support.hosts import QUICK

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.distributed

GIB = 1 << 30
BUDGETS_GIB = [3 * 2**20 / GIB, 2.2 * 2**20 / GIB]
STATES_GIB = 0.5 * 2**20 / GIB
LENGTHS = [256] * 10
BUCKET = 20_000  # gradient elements in a bucket; DeepSpeed's default would take 2 GB of the device


def cases_of(stage: int) -> dict[str, Any]:
    stages = {"stage": stage, "stage3_param_persistence_threshold": 0}
    buckets = {"reduce_bucket_size": BUCKET, "stage3_prefetch_bucket_size": BUCKET}
    both = {"stage": stage, "lengths": [LENGTHS] * 2, "fields": {"zero_optimization": {**stages, **buckets}}}
    block = {
        "enabled": True,
        "profiler": QUICK,
        "swap": {"enabled": True, "min_bytes": 1},
        "tokenwise": {"enabled": False},
        "arena": {"enabled": False},
    }
    budgets = {"device_budget_gib": BUDGETS_GIB}
    # with swapped optimizer states the budget has to hold the parameters, even on the CPU
    states = {
        **block,
        "swap": {**block["swap"], "states": True},
    }
    more = {"device_budget_gib": [budget + STATES_GIB for budget in BUDGETS_GIB]}
    return {
        f"plain {stage}": {**both, "memplug": None},
        str(stage): {**both, "memplug": block, **budgets},
        f"states {stage}": {**both, "memplug": states, **more},
    }


@pytest.mark.long
@pytest.mark.parametrize("stages", [pytest.param((0, 3), id="0 and 3"), pytest.param((1, 2), marks=pytest.mark.long)])
def test_ranks_with_different_budgets_train_bit_identically(stages: tuple[int, ...], tmp_path: Path) -> None:
    cases = {name: case for stage in stages for name, case in cases_of(stage).items()}
    launch_forked(["tests.support.training_worker", tmp_path, json.dumps(cases)], module=True)
    for rank, budget_gib in enumerate(BUDGETS_GIB):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for stage in stages:
            found, states, plain = (results[f"{kind}{stage}"] for kind in ("", "states ", "plain "))
            for each in (found, states):
                assert each["losses"] == plain["losses"] and each["digest"] == plain["digest"], stage
            assert states["report"]["swap"] == "swapping" and states["report"]["swap_refused"] == 0
            report = found["report"]
            assert report["swap"] == "swapping" and report["swap_released_bytes"] > 0
            assert report["swap_passive"] > 0, "the first steps did not fit"
            assert report["swap_peak_bytes"] <= budget_gib * GIB
            assert report["swap_demanded"] == report["swap_cancelled"] == report["swap_refused"] == 0
