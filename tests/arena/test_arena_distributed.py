"""The planned arena under DeepSpeed on two processes: ZeRO 0 to 3, accumulation, and validation in between."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import ROOT
from tests.support.forking import launch_forked
from tests.support.serving import ALONE

pytestmark = pytest.mark.distributed

PLANNED = {
    "enabled": True,
    "plan_dir": False,
    "tokenwise": {"min_offload_bytes": 1},
    "profiler": {"warmup_steps": 2, "policy_steps": 0},
}


def trained(folder: Path, cases: dict[str, Any], time_limit_s: float) -> dict[str, list[dict[str, Any]]]:
    """Train all cases on two ranks, and return the results of each case by rank."""
    launch_forked(["tests.support.arena_worker", folder, json.dumps(cases)], module=True, time_limit_s=time_limit_s)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in cases}


@pytest.mark.parametrize(
    ("stages", "steps", "validate", "share"),
    [((1, 3), 14, 5, 0.97), pytest.param(range(4), 60, 24, 0.99, marks=pytest.mark.long)],
)
def test_arena_serves_every_zero_stage_with_unchanged_losses(
    stages: Sequence[int], steps: int, validate: int, share: float, tmp_path: Path
) -> None:
    """Check that the arena serves at least `share` of the requests from the first plan on.

    Under ZeRO 3 the first served step differs from the second. The threads of collectives free memory at another time
    in each step; if the cores are busy, up to 4 requests in 1,000 differ from the plan.
    """
    case = {"model": "llama", "memplug": PLANNED, "steps": steps, "validate": validate}
    cases = {f"ZeRO {stage}": {"stage": stage, **case} for stage in stages}
    for name, ranks in trained(tmp_path, cases, 900).items():
        for rank in ranks:
            report = rank["report"]
            assert rank["with"] == rank["without"] and len(rank["with"]) == 2 * steps + 2, name
            served = report["arena_served"] + report["arena_dynamic"] + report["arena_reusable"]
            assert report["arena"] == "serving"
            assert served / (served + report["arena_fallback"]) >= share, (name, report)


@pytest.mark.long
def test_llama2_recipe_keeps_its_losses_with_arena_checks(tmp_path: Path) -> None:
    config = json.loads((ROOT / "configs/ds_tiny.json").read_text())
    config["memplug"] |= {"arena": {"checks": True}, "plan_dir": False, "profiler": {"policy_steps": 0}}
    checked = tmp_path / "ds.json"
    checked.write_text(json.dumps(config))
    entries, reports = {}, {}
    for name, way, alpha in (("plain", "none", "1"), ("1", "install", "1"), ("auto", "install", "auto")):
        log = tmp_path / f"{name}.jsonl"
        options = ["--deepspeed_config", checked, "--loss-log", log, "--memplug", way, "--alpha", alpha]
        train = ROOT / "examples/llama2/train.py"
        launch_forked([train, "--steps", 16, "--seq-len", 64, "--eval-every", 5, *options])
        *entries[name], last = [json.loads(line) for line in log.read_text().splitlines()]
        reports[name] = last["report"].get("memplug")
    assert entries["1"] == entries["plain"]
    losses = [[entry["loss"] for entry in entries[name]] for name in ("auto", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4), "rows that are split are summed in another order"
    for name in ("1", "auto"):
        assert reports[name]["arena"] == "serving" and reports[name]["arena_served"] > 1000
        assert reports[name]["arena_served"] > 100 * reports[name]["arena_fallback"]


def test_arena_serves_a_mixture_of_experts_on_two_processes(tmp_path: Path) -> None:
    case = {"stage": 1, "model": "mixtral", "memplug": {**ALONE, "arena": {"checks": True}}, "steps": 16, "validate": 7}
    for rank in trained(tmp_path, {"mixture": case}, 200)["mixture"]:
        assert rank["with"] == rank["without"]
        assert rank["report"]["arena_served"] > 0 and rank["report"]["arena_dynamic"] > 0
