"""Megatron-Core on two processes: the same gradients and losses with memplug as without, however the model is split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.megatron_ranks import MIXTURE, block, relative_error, train, train_on_cuda

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "tensor and sequence": {"tensor": 2, "sequence": True, "micro_batches": 2},
    "pipeline": {"pipeline": 2, "micro_batches": 8, "fields": {"deallocate_pipeline_outputs": True}},
    "interleaved": {"pipeline": 2, "chunks": 2, "micro_batches": 4},
    "all-to-all": {"expert": 2, **MIXTURE},
    "all-gather": {"expert": 2, "dispatcher": "allgather", **MIXTURE},
    "tensor, sequence and expert": {"tensor": 2, "sequence": True, "expert": 2, **MIXTURE},
    "distributed optimizer": {"distributed_optimizer": True, "micro_batches": 2},
}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
RECOMPUTES: dict[str, dict[str, Any]] = {
    "full, uniform": {"fields": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 1}},
    "full, uniform by two": {"fields": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2}},
    "full, block": {"fields": {**FULL, "recompute_method": "block", "recompute_num_layers": 2}},
    "selective": {"fields": {**SELECTIVE, "recompute_modules": ["core_attn", "mlp"]}},
    "selective in a mixture": {
        "fields": {
            **SELECTIVE,
            "recompute_modules": ["core_attn", "moe", "shared_experts"],
            "moe_shared_expert_intermediate_size": 32,
        },
        **MIXTURE,
    },
    "selective in grouped experts": {
        "fields": {**SELECTIVE, "recompute_modules": ["moe_act", "layernorm"], "moe_grouped_gemm": True},
        "transformer_engine": True,
        **MIXTURE,
    },
}
CASES = {
    "0": block(0.0, arena=False),
    "1": block(1.0, arena=True),
    "0.5": block(0.5, arena=False),
    "auto": block("auto", arena=True),
}
SELECTION = [
    ("tensor and sequence", ("0", "1"), 8),
    ("pipeline", ("auto",), 6),
    ("interleaved", ("1",), 6),
    ("all-to-all", ("auto",), 6),
    # the arena needs more steps if routing changes from step to step
    *(
        pytest.param(name, tuple(CASES), 14 if "experts" in LAYOUTS[name] else 10, marks=pytest.mark.long)
        for name in LAYOUTS
    ),
]


def assert_offloaded_as_planned(rank: dict[str, Any]) -> None:
    report = rank["auto"]["report"]
    assert report["offloaded_step_bytes"] == pytest.approx(report["expected_step_bytes"], rel=0.02)


@pytest.mark.parametrize(("layout", "alphas", "steps"), SELECTION)
def test_gradients_and_losses_equal_those_without_memplug(layout, alphas, steps, tmp_path):
    cases = {"without": None, **{alpha: CASES[alpha] for alpha in alphas}}
    for rank in train(tmp_path, {"steps": steps, **LAYOUTS[layout]}, cases):
        plain = rank["without"]
        for alpha in alphas:
            if alpha in ("0", "1"):
                assert rank[alpha]["digests"] == plain["digests"], f"alpha {alpha}"
                assert rank[alpha]["losses"] == plain["losses"], f"alpha {alpha}"
            else:
                assert relative_error(rank[alpha]["gradients"], plain["gradients"]) < 1e-5, f"alpha {alpha}"
                assert rank[alpha]["losses"] == pytest.approx(plain["losses"], abs=2e-3), f"alpha {alpha}"
            assert rank[alpha]["report"]["recomputed_in_full"] == 0, f"alpha {alpha}"
            assert rank[alpha]["report"]["offloaded_bytes"] > 0, f"alpha {alpha}"
        if "auto" in alphas:
            assert "stable" in dict((stage, step) for step, stage in rank["auto"]["history"])
            if "experts" not in LAYOUTS[layout]:  # routing differs from step to step
                assert_offloaded_as_planned(rank)
        if "1" in alphas:
            assert rank["1"]["report"]["arena_served"] > 0
        if {"0", "1"} <= set(alphas):
            assert rank["1"]["report"]["offloaded_bytes"] > rank["0"]["report"]["offloaded_bytes"]


@pytest.mark.parametrize(
    ("asked", "split"),
    [
        ("full, uniform", {}),
        ("selective", {}),
        ("full, block", {"pipeline": 2, "chunks": 2, "micro_batches": 4}),
        pytest.param("full, uniform by two", {}, marks=pytest.mark.long),
        pytest.param("full, uniform", {"tensor": 2, "sequence": True}, marks=pytest.mark.long),
        pytest.param("full, block", {}, marks=pytest.mark.long),
        pytest.param("selective in a mixture", {}, marks=pytest.mark.long),
        pytest.param("selective in a mixture", {"expert": 2}, marks=pytest.mark.long),
        pytest.param("selective in grouped experts", {}, marks=pytest.mark.long),
    ],
)
def test_results_equal_those_with_megatrons_own_recomputation(asked, split, tmp_path):
    cases = {"own": None, "0": CASES["0"], "1": CASES["1"]}
    for rank in train(tmp_path, {"steps": 4, **RECOMPUTES[asked], **split}, cases, processes=2 if split else 1):
        for alpha in ("0", "1"):
            assert rank[alpha]["losses"] == rank["own"]["losses"]
            assert rank[alpha]["digests"] == rank["own"]["digests"]
            assert rank[alpha]["report"]["offloaded_bytes"] > 0 == rank[alpha]["report"]["recomputed_in_full"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "asked",
    [
        "full, uniform",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("full, uniform by two", "full, block", "selective", "selective in a mixture")
        ),
    ],
)
def test_step_holds_no_more_than_under_megatrons_recomputation(asked: str, tmp_path: Path) -> None:
    cases = {"own": None, "0": CASES["0"], "1": block(1.0, arena=False)}
    # with fewer groups than heads, simulated attention is not fused, and alpha 1 would prefetch the scores of all pairs
    layout = RECOMPUTES[asked] | {"fields": {**RECOMPUTES[asked]["fields"], "num_query_groups": 4}}
    [rank] = train_on_cuda(tmp_path, {"steps": 5, "tokens": 256, **layout}, cases)
    for alpha in ("0", "1"):
        assert rank[alpha]["losses"] == rank["own"]["losses"]
        assert rank[alpha]["digests"] == rank["own"]["digests"]
        assert rank[alpha]["step_bytes"] <= rank["own"]["step_bytes"]


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_swap_list_keeps_ranks_within_budget_and_results_to_the_bit(layout, tmp_path):
    # in a pipeline, graphs of several micro-batches are in flight
    alone = {
        "enabled": True,
        "plan_dir": False,
        "tokenwise": {"enabled": False},
        "arena": {"enabled": False},
        "profiler": {"wait_for_plans": True, "warmup_steps": 1},
        "swap": {"enabled": True, "min_bytes": 1},
    }
    cases = {"without": None, "roomy": {**alone, "device_budget_gib": 1000}, "short": {**alone, "budget_share": 0.8}}
    settings = {**LAYOUTS[layout], "tokens": 256, "micro_batches": 3, "steps": 14}
    ranks = train(tmp_path, settings, cases)
    budget_bytes = 0.8 * max(rank["roomy"]["peak_bytes"] for rank in ranks)
    for rank in ranks:
        assert rank["short"]["losses"] == rank["roomy"]["losses"] == rank["without"]["losses"]
        assert rank["short"]["digests"] == rank["roomy"]["digests"] == rank["without"]["digests"]
        assert rank["short"]["peak_bytes"] <= budget_bytes
        report = rank["short"]["report"]
        assert report["swap_demanded"] == report["swap_missed"] == report["swap_refused"] == 0
    swapping = [rank["short"]["report"] for rank in ranks if rank["short"]["report"]["swap"] == "swapping"]
    assert len(swapping) >= (1 if layout == "pipeline" else 2)
    assert all(report["swap_released_bytes"] > 0 for report in swapping)


@pytest.mark.parametrize(
    "layout",
    [
        "all-to-all",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("all-gather", "tensor, sequence and expert")),
    ],
)
def test_mixture_with_repeated_routing_offloads_the_planned_bytes(layout, tmp_path):
    settings = {**LAYOUTS[layout], "same": True, "steps": 8}
    for rank in train(tmp_path, settings, {"auto": block("auto", arena=False)}):
        assert_offloaded_as_planned(rank)


@pytest.mark.parametrize("alpha", [0.5, pytest.param(1.0, marks=pytest.mark.long)])
def test_all_ranks_swap_less_once_one_is_short_of_host_memory(alpha, tmp_path):
    short = {**block(alpha, arena=False), "short_of_host_memory": [1, 4]}
    layout = {"tensor": 2, "sequence": True, "steps": 12}
    ranks = train(tmp_path, layout, {"without": None, "short": short})
    assert ranks[0]["short"]["shares"] == ranks[1]["short"]["shares"], "in the same steps, by the same share"
    shares = ranks[0]["short"]["shares"]
    assert shares[:5] == [1.0] * 5 and sorted(shares, reverse=True) == shares and shares[-1] < 0.9
    for rank in ranks:
        assert rank["short"]["losses"] == pytest.approx(rank["without"]["losses"], abs=2e-3)
    assert ranks[1]["short"]["report"]["host_refusals"] > 0 == ranks[0]["short"]["report"]["host_refusals"]


def test_ranks_with_different_blocks_are_refused_before_the_first_step(tmp_path):
    ranks = train(tmp_path, {"tensor": 2}, {"other": {**block(0.0, arena=False), "alpha_of_rank": [0.0, 0.5]}})
    assert all("rank 1 differs from that of rank 0, in tokenwise" in rank["other"]["error"] for rank in ranks)
