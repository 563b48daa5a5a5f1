"""DeepSpeed's Ulysses on four processes under ZeRO 3; each pair of processes shares its sequences.

With memplug all numbers are those without it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.forking import launch_forked

pytestmark = [pytest.mark.distributed, pytest.mark.long]

SHORT_RANK, SHORT_STEP = 1, 6


def block(model: str, alpha: float | str) -> dict[str, Any]:
    """Return a block that swaps even the smallest tensor, and plans early."""
    regions = {"regions": ["blocks.*"]} if model == "ulysses" else {}
    return {
        "enabled": True,
        "plan_dir": False,
        "tokenwise": {"min_offload_bytes": 1, "alpha": alpha, **regions},
        "profiler": {"warmup_steps": 1, "policy_steps": 0, "wait_for_plans": True},
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return each rank's results."""
    folder = tmp_path_factory.mktemp("ulysses")
    cases = {}
    for model in ("ulysses", "alst"):
        common = {"model": model, "sequence": 2, "zero": {"stage": 3}}
        cases[f"{model}: plain"] = {**common, "memplug": None}
        for alpha in (0.0, 1.0, "auto"):
            cases[f"{model}: {alpha}"] = {**common, "memplug": block(model, alpha)}
        short = {"short_of_host_memory": [SHORT_RANK, SHORT_STEP]}
        cases[f"{model}: auto, short"] = {**common, "memplug": block(model, "auto"), **short}
    launch_forked(["tests.support.offload_worker", folder, json.dumps(cases)], processes=4, module=True)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("case", ["0.0", "1.0", "auto", "auto, short"])
@pytest.mark.parametrize("model", ["ulysses", "alst"])
def test_losses_and_weights_of_four_ranks_equal_those_without_memplug(
    model: str, case: str, ranks: list[dict[str, Any]]
) -> None:
    # the rank that runs short of host memory must not launch an exchange that the others do not launch
    for rank, results in enumerate(ranks):
        plain, ours = results[f"{model}: plain"], results[f"{model}: {case}"]
        if case in ("0.0", "1.0"):
            assert ours["losses"] == plain["losses"] and ours["digests"] == plain["digests"]
            assert ours["digest"] == plain["digest"]
        else:  # rows that are recomputed apart from the others round differently
            assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-4)
        report = ours["report"]
        assert report["opaque_regions"] == report["recomputed_in_full"] == 0
        assert report["stage"] == "stable" and report["offloaded_bytes"] > 0 and report["regions"] == 3
        assert (report["host_refusals"] > 0) == (rank == SHORT_RANK and "short" in case)
        assert ours["shares"] == ranks[0][f"{model}: {case}"]["shares"]
        if "short" in case:
            assert ours["shares"][-1] < 0.9 < 1.0 == ours["shares"][SHORT_STEP]


def test_ranks_of_a_group_share_a_sequence(ranks: list[dict[str, Any]]) -> None:
    plain = [results["ulysses: plain"] for results in ranks]
    assert len({tuple(rank["losses"]) for rank in plain}) == 4 and len({rank["digest"] for rank in plain}) == 1
    plain = [results["alst: plain"] for results in ranks]
    assert plain[0]["losses"] == plain[1]["losses"] != plain[2]["losses"] == plain[3]["losses"], (
        "ranks of a group report their mean loss"
    )
    assert len(set(plain[0]["digests"])) == len(plain[0]["digests"]), "it trains: every step differs"
