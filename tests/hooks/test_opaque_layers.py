"""Layers of Transformer Engine train equal to the bit, and recompute with the FP8 scales of their forward.

Attention never runs again if the link can carry its saved tensors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.with_and_without import ALPHAS, EXACT, assert_same, block, cases_of, run

LAYERS, STEPS = 3, 20


PROGRAMS: dict[str, dict[str, Any]] = {
    "Parts": {"layer": "Parts"},
    "Drops": {"layer": "Drops", "steps": 6},
    "Mixed": {"layer": "Mixed", "steps": 6},
    "Whole": {"layer": "Whole", "steps": 6},
    "delayed": {"layer": "Parts", "recipe": "DelayedScaling", "micro_batches": 2, "steps": STEPS},
    "twice": {"layer": "Twice", "recipe": "DelayedScaling", "micro_batches": 2, "steps": 6},
    "dropped": {"layer": "Twice", "recipe": "DelayedScaling", "micro_batches": 2, "dropped": 1, "steps": 6},
    "current": {"layer": "Parts", "recipe": "Float8CurrentScaling", "steps": 6},
    "around backward": {"layer": "Parts", "around_backward": "Float8CurrentScaling", "steps": 6},
}
REGIONS = {"regions": ["layers.*"]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = cases_of(PROGRAMS, ALPHAS, **REGIONS) | dict.fromkeys(("refusals", "errors"), block(0.0, **REGIONS))
    return run("opaque_layers_worker", tmp_path_factory.mktemp("opaque_layers"), cases)


@pytest.mark.parametrize("alpha", EXACT)
@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_and_gradients_equal_plain_training_to_the_bit(
    program: str, alpha: str, results: dict[str, Any]
) -> None:
    assert_same(results[f"{program} none"], results[f"{program} {alpha}"])


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_fp8_scales_and_histories_equal_plain_training(program: str, alpha: str, results: dict[str, Any]) -> None:
    plain, found = results[f"{program} none"]["scales"], results[f"{program} {alpha}"]["scales"]
    assert len(found) == len(plain)
    assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_backward_leaves_no_fp8_scales_queued(program: str, alpha: str, results: dict[str, Any]) -> None:
    # a unit that never runs again must not leave FP8 scales behind, which another run would take
    assert results[f"{program} {alpha}"]["queued"] == 0


def test_failed_step_leaves_no_fp8_scales_queued(results: dict[str, Any]) -> None:
    assert results["errors"]["raised"] == ["", "it fails, again", "it fails, forward", ""]
    assert results["errors"]["queued"] == 0


def test_recomputing_a_module_called_twice_uses_the_forwards_fp8_histories(results: dict[str, Any]) -> None:
    histories = results["twice 0"]["histories"]
    assert len(histories["again"]) == 2 * LAYERS
    assert sorted(histories["again"]) == sorted(histories["forward"])


@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_with_half_the_rows_swapped_differ_only_by_rounding(program: str, results: dict[str, Any]) -> None:
    plain, found = results[f"{program} none"]["losses"], results[f"{program} half"]["losses"]
    assert found == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_region_is_opaque(program: str, alpha: str, results: dict[str, Any]) -> None:
    assert results[f"{program} {alpha}"]["report"]["opaque_regions"] == 0


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_attention_runs_once_per_step(program: str, alpha: str, results: dict[str, Any]) -> None:
    plain, found = results[f"{program} none"]["functions"], results[f"{program} {alpha}"]["functions"]
    attention = [name for name in plain if "Attn" in name or "Attention" in name]
    assert attention
    for name in attention:
        assert found[name] == plain[name]


@pytest.mark.parametrize("program", PROGRAMS)
def test_alpha_1_recomputes_no_matmul_and_alpha_0_every_needed_matmul(program: str, results: dict[str, Any]) -> None:
    plain, case = results[f"{program} none"]["functions"], PROGRAMS[program]
    assert results[f"{program} 1"]["functions"] == plain
    again = results[f"{program} 0"]["functions"]["_LayerNormLinear"] - plain["_LayerNormLinear"]
    assert again == LAYERS * (case.get("micro_batches", 1) - case.get("dropped", 0))


def test_offloaded_bytes_equal_those_that_the_plan_predicts(results: dict[str, Any]) -> None:
    for program in ("Parts", "current"):
        report = results[f"{program} auto"]["report"]
        assert report["offloaded_step_bytes"] == pytest.approx(report["expected_step_bytes"], rel=0.02)


def test_swapping_half_the_rows_halves_the_recomputed_flops(results: dict[str, Any]) -> None:
    # the last layer's tensors never leave the device
    plain, none, half = (sum(results[f"Parts {case}"]["flops"].values()) for case in ("none", "0", "half"))
    assert none > plain
    assert half - plain == pytest.approx((none - plain) / 2 * (LAYERS - 1) / LAYERS, rel=0.01)
    assert results["Parts half"]["functions"]["_Linear"] == 2 * LAYERS - 1


@pytest.mark.parametrize(
    ("call", "message", "advice"),
    [
        ("checkpoint", "pytorch.checkpoint is called while memplug recomputes", "Call the function itself"),
        ("distributed.checkpoint", "pytorch.checkpoint is called while memplug recomputes", "Call the function itself"),
        ("offload", "get_cpu_offload_context is called while memplug offloads", "Leave it out"),
        ("offload by position", "get_cpu_offload_context is called while memplug offloads", "Leave it out"),
        ("cpu_offload.offload", "get_cpu_offload_context is called while memplug offloads", "Leave it out"),
    ],
)
def test_transformer_engine_recompute_and_offload_are_refused(
    call: str, message: str, advice: str, results: dict[str, Any]
) -> None:
    found = results["refusals"]["during"][call]
    assert found.startswith("ConflictError") and message in found and advice in found
    assert "memplug" not in results["refusals"]["behind"][call]


@pytest.mark.parametrize("call", ["no offload", "no offload by position", "no offload by default"])
def test_disabled_offload_context_is_accepted(call: str, results: dict[str, Any]) -> None:
    assert results["refusals"]["during"][call] == ""
