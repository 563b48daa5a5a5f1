"""Run ranks, some of which do not train or take fewer steps, and compare their results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking import launch_forked

BLOCKS = {
    "auto": {"profiler": {"warmup_steps": 1, "policy_steps": 2, "wait_for_plans": True}},
    "1": {"tokenwise": {"alpha": 1.0}},
}
LIMIT_S = 2.0
STOPS = "planning ends, and all ranks keep the last plan"


def run(folder: Path, processes: int, launch: Callable[..., str] = launch_forked, **case: Any) -> list[dict[str, Any]]:
    """Run a case and return each rank's results, or an empty dictionary for a rank that died."""
    case = {"block": BLOCKS["auto"], "timeout_s": 40, **case}
    arguments = ["tests.support.apart_worker", folder, json.dumps(case)]
    launch(arguments, processes=processes, module=True, time_limit_s=100)
    files = [folder / f"{rank}.json" for rank in range(processes)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def warnings(ranks: list[dict[str, Any]], text: str) -> list[str]:
    return [line for rank in ranks for line in rank.get("warnings", []) if text in line]


def assert_equal(rank: dict[str, Any], exactly: bool = False) -> None:
    """Assert equal losses with and without memplug: to the bit, or to the rounding of split matmuls."""
    losses = rank["without"]["losses"]
    assert rank["with"]["losses"] == (losses if exactly else pytest.approx(losses, rel=1e-5))
    assert not exactly or rank["with"]["digest"] == rank["without"]["digest"]
    assert rank["with"]["offloaded"] > 0


def same_decisions(results: list[dict[str, Any]]) -> bool:
    return all(one["settings"] == results[0]["settings"] and one["stage"] == results[0]["stage"] for one in results)
