"""The stand-ins of Transformer Engine and flash-attn compute the results of torch's operators.

They have the state of the real packages (tests/support/stand_ins).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.launching import launch

pytestmark = pytest.mark.long

DELAYED = ("plain", "checkpoint", "again", "contexts")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("stand_ins")
    launch(["tests.support.stand_in_worker", folder], launcher="python", module=True)
    return torch.load(folder / "results.pt", weights_only=False)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    folder = tmp_path_factory.mktemp("stand_ins_on_ranks")
    launch(["tests.support.stand_in_ranks_worker", folder], module=True)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def test_outputs_and_gradients_equal_those_of_torch_operators(results: dict[str, Any]) -> None:
    for case in ("linears", "attentions", "movers"):
        for name, difference in results[case].items():
            assert difference < 1e-5, name


def test_bfloat16_differs_from_float32_only_by_rounding(results: dict[str, Any]) -> None:
    assert 0 < results["sixteen_bits"] < 0.03


def test_results_are_deterministic_and_independent_of_row_count(results: dict[str, Any]) -> None:
    assert results["repeats"] == {"equal": True, "some_rows": True}


def test_dispatcher_sees_only_allocations_and_backward_frees_tensors(results: dict[str, Any]) -> None:
    found = results["dispatcher"]
    assert found["operators"] <= {"empty", "view", "detach"}
    hidden, ffn = (4, 32), (4, 128)
    assert found["saved"][0] == found["saved"][2] == hidden and ffn in found["saved"]
    assert found["freed"] == 5  # the norm's output, means and deviations, and the activation's input and output


def test_repeated_fp8_forward_changes_losses_outside_recompute_contexts(
    results: dict[str, Any],
) -> None:
    plain, checkpoint, again, contexts = (results["recipes"][how] for how in DELAYED)
    assert checkpoint == plain
    assert contexts == plain
    assert again[0] != plain[0] and again[1] != plain[1]


@pytest.mark.parametrize("kind", ["Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling"])
def test_repeated_forward_gives_equal_losses_under_stateless_fp8_recipes(kind: str, results: dict[str, Any]) -> None:
    recipes = results["recipes"]
    assert recipes[kind] == recipes[f"{kind} again"]
    assert recipes[kind][0] != recipes["plain"][0]
    assert recipes[kind][0] == pytest.approx(recipes["plain"][0], rel=1e-3)


def test_micro_batches_share_the_cast_weight_and_accumulate_one_gradient(results: dict[str, Any]) -> None:
    found = results["micro_batches"]
    assert found["main_grad"] < 1e-5 and found["grad"]
    assert found["casts"] == 10  # two inputs and two gradients, twice each; two forms of the weight, once each
    assert "Float8Tensor" in found["saved"]


def test_attention_dropout_follows_the_generator_state(results: dict[str, Any]) -> None:
    assert results["dropout"] == {"same_state": True, "next_state": False}


def test_hugging_face_llama_trains_with_flash_attention_as_with_sdpa(results: dict[str, Any]) -> None:
    found = results["hugging_face"]
    assert found["flash_attention_2"] == pytest.approx(found["sdpa"], rel=1e-5)
    assert found["forwards"] == 6


@pytest.mark.distributed
def test_stand_in_names_the_fp8_state_as_its_version_of_te_does(
    results: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    assert results["names"] == ["get_autocast_state", "AUTOCAST_DEPTH"]
    assert ranks[0]["names"] == ["quantization_state"]


@pytest.mark.distributed
def test_context_and_tensor_parallelism_give_the_results_of_one_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for case in ("context_parallel", "tensor_parallel", "megatron_context"):
            for name, difference in rank[case].items():
                low, high = (1e-4, 0.2) if name.startswith("FP8") else (-1, 1e-5)
                assert low < difference < high, name


@pytest.mark.distributed
def test_fp8_scales_use_the_largest_magnitude_over_both_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["reduced_scales"] for rank in ranks)
    assert first == second
    assert first[0] == pytest.approx(448 / 5)  # from the input of the second rank's second step


@pytest.mark.distributed
@pytest.mark.parametrize("layers", ["dense", "experts"])
def test_megatron_trains_with_te_layers_as_with_its_local_layers(layers: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["megatron"]
        assert found[f"{layers} te"] == pytest.approx(found[f"{layers} local"], rel=1e-4)
        assert rank["functions"]["_LayerNormLinear"] > 0 and rank["functions"]["_GroupedLinear"] > 0
