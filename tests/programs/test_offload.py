"""DeepSpeed's own offloading to the CPU and its Ulysses attention, on two processes with memplug and its arena."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.forking import launch_forked

pytestmark = pytest.mark.distributed

CPU = {"device": "cpu"}
SETUPS: dict[str, dict[str, Any]] = {
    "ZeRO 2, optimizer": {"zero": {"stage": 2, "offload_optimizer": CPU}, "model": "llama"},
    "ZeRO 3, optimizer and parameters": {
        "zero": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
        "model": "llama",
    },
    "Ulysses": {"zero": {"stage": 1}, "model": "ulysses"},
}
OFFLOADED = {
    "ZeRO 2, optimizer": [True, False],
    "ZeRO 3, optimizer and parameters": [True, True],
    "Ulysses": [False, False],
}


def block(setup: str, alpha: float) -> dict[str, Any]:
    """Return a block that swaps even the smallest tensor, and plans addresses early."""
    regions = {"regions": ["blocks.*"]} if setup == "Ulysses" else {}
    return {
        "enabled": True,
        "plan_dir": False,
        "tokenwise": {"min_offload_bytes": 1, "alpha": alpha, **regions},
        "profiler": {"warmup_steps": 1, "policy_steps": 0},
        "arena": {"enabled": True},
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return each rank's results of every setup, without memplug and with it."""
    folder = tmp_path_factory.mktemp("offload")
    cases = {}
    for setup, case in SETUPS.items():
        cases[f"{setup}: plain"] = {**case, "memplug": None}
        for alpha in (0.0, 1.0):
            cases[f"{setup}: {alpha}"] = {**case, "memplug": block(setup, alpha)}
    launch_forked(["tests.support.offload_worker", folder, json.dumps(cases)], module=True, time_limit_s=300)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("setup", SETUPS)
def test_losses_and_weights_equal_those_without_memplug_and_arena_serves(
    setup: str, alpha: float, ranks: list[dict[str, Any]]
) -> None:
    for results in ranks:
        plain, ours = results[f"{setup}: plain"], results[f"{setup}: {alpha}"]
        assert ours["losses"] == plain["losses"] and ours["digest"] == plain["digest"]
        assert plain["losses"][-1] < plain["losses"][1], "it trains: every other batch is the same"
        report = ours["report"]
        assert report["regions"] == 3 and report["recomputed_in_full"] == 0
        assert report["offloaded_bytes"] > 0 and report["arena_served"] > 0
        assert plain["offloaded"] == ours["offloaded"] == OFFLOADED[setup], "DeepSpeed offloads too"


def test_ulysses_ranks_have_different_tokens_and_the_same_weights(ranks: list[dict[str, Any]]) -> None:
    first, second = (results["Ulysses: 1.0"] for results in ranks)
    assert first["losses"] != second["losses"] and first["digest"] == second["digest"]
