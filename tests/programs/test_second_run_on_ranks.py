"""Ranks resume from their plans together, or all plan anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forking import launch_forked
from tests.support.second_runs import FIRST, SMALL


def ranks_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.distributed
def test_ranks_of_every_zero_stage_resume_together(tmp_path: Path) -> None:
    # each run starts in new processes
    block = {"enabled": True, **SMALL}
    cases = {
        str(stage): {
            "stage": stage,
            "memplug": {**block, "plan_dir": str(tmp_path / f"plans{stage}")},
            "lengths": [[12] * 12] * 2,
        }
        for stage in range(4)
    }
    runs = []
    for _ in range(2):
        launch_forked(["tests.support.training_worker", tmp_path, json.dumps(cases)], module=True)
        runs.append(ranks_of(tmp_path))
    for firsts, seconds in zip(*runs, strict=True):
        for stage in cases:
            first, second = firsts[stage], seconds[stage]
            assert first["stages"][0] == "warm-up" and first["report"]["arena_plans"] > 0, stage
            assert second["losses"] == first["losses"] and second["digest"] == first["digest"], stage
            assert second["stages"] == ["stable"] * 12, stage
            report = second["report"]
            made = report["replans"], report["arena_plans"], report["recorded_steps"], report["planned_steps"]
            assert made == (0, 0, 0, 12), stage
            assert min(second["served"]) > 0, stage


@pytest.mark.long
@pytest.mark.distributed
def test_all_ranks_plan_anew_if_one_rank_has_no_plan(tmp_path: Path) -> None:
    case = {"stage": 1, "memplug": {"enabled": True, **SMALL, "plan_dir": str(tmp_path / "plans")}}
    case["lengths"] = [[12] * 10] * 2
    launch_forked(["tests.support.training_worker", tmp_path, json.dumps({"first": case})], module=True)
    files = sorted((tmp_path / "plans").glob("*.json"))
    assert [file.name.partition(".")[2] for file in files] == ["rank0.json", "rank1.json"]
    files[1].unlink()
    launch_forked(["tests.support.training_worker", tmp_path, json.dumps({"again": case})], module=True)
    for results in ranks_of(tmp_path):
        assert results["again"]["stages"][:3] == [each.value for each in FIRST]
        assert "for another rank than 1" in results["again"]["report"]["not_resumed_because"]


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout", [{"tensor": 2}, pytest.param({"expert": 2, "experts": 8, "same": True}, marks=pytest.mark.long)]
)
def test_ranks_of_a_megatron_model_resume_together(layout: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    steps = 14
    block = {"enabled": True, **SMALL, "plan_dir": str(tmp_path / "plans")}
    arguments = [json.dumps({**layout, "steps": steps}), json.dumps({"first": block, "second": block})]
    launch_forked(["tests.support.megatron_worker", tmp_path, *arguments], libraries="megatron", module=True)
    for rank in (0, 1):
        results = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        first, second = results["first"], results["second"]
        assert first["report"]["arena_plans"] > 0
        assert second["losses"] == first["losses"] and second["digests"] == first["digests"]
        report = second["report"]
        made = report["replans"], report["arena_plans"], report["recorded_steps"], report["planned_steps"]
        assert made == (0, 0, 0, steps)
        assert min(second["served"]) > 0
