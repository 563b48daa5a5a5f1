"""A Megatron-Core rank on the virtual device: its memory and work under each way to split a model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from memplug.predict.estimator.estimate import estimate_training
from memplug.predict.estimator.layout import RankLayout
from memplug.predict.estimator.megatron import MegatronTraining, rank_of
from memplug.predict.estimator.request import EstimateRequest
from memplug.predict.estimator.result import Estimate
from memplug.predict.estimator.shapes import Shape
from memplug.predict.estimator.workload import Workload
from memplug.predict.virtual import GpuProfile
from tests.support.virtual_devices import H200

pytest.importorskip("megatron.core")
DENSE = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WITHOUT_ARENA = {"enabled": True, "arena": {"enabled": False}}
TOKENS = 2048


def _estimated(
    layout: RankLayout,
    modes: Sequence[str] = ("keep",),
    *,
    stage: int = 0,
    micro_batches: int = 1,
    block: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Estimate, int]:
    """Return this rank's estimate, and its number of parameters."""
    shape = Shape(DENSE | (EXPERTS if fields.pop("mixture", False) else {}))
    workload = Workload(shape=shape, seq_len=TOKENS, **{"layers": 4, **fields})
    parameters = []

    def make_training() -> MegatronTraining:
        training = MegatronTraining(workload, layout, micro_batches)
        parameters.append(sum(each.numel() for each in training.model.parameters()))
        return training

    rank = functools.partial(rank_of, layout, stage, workload, micro_batches)
    request = EstimateRequest.of(block or WITHOUT_ARENA, GpuProfile.read(H200), modes)
    found = estimate_training(make_training, request, rank=rank)
    return found, parameters[0]


def test_tensor_parallel_ranks_share_parameters_activations_and_work() -> None:
    modes = ("keep", "full", "selective")
    alone, all_parameters = _estimated(RankLayout(), modes)
    split, parameters = _estimated(RankLayout(tensor=2, sequence=True), modes)
    norms = 9 * DENSE["hidden_size"]
    assert 2 * (parameters - norms) == all_parameters - norms
    for mode in alone:
        assert 2 * split[mode].flops == pytest.approx(alone[mode].flops)
        assert 0.5 <= split[mode].peak_allocated_bytes / alone[mode].peak_allocated_bytes < 0.6
    assert "c10d::_allgather_base_" in {span.name for span in split["keep"].spans}
    attention = 4 * 2 * TOKENS * TOKENS * DENSE["hidden_size"]  # FLOPs of four layers' forwards
    assert alone["full"].flops - alone["selective"].flops == pytest.approx(attention)


@pytest.mark.long
def test_memplug_keeps_a_rank_within_its_budget() -> None:
    layout = RankLayout(tensor=2, sequence=True)
    keep = _estimated(layout)[0]["keep"]
    budget_bytes = int(0.85 * keep.peak_allocated_bytes)
    block = {"enabled": True, "device_budget_gib": budget_bytes / 2**30, "tokenwise": {"min_offload_bytes": 4096}}
    memplug = _estimated(layout, ("memplug",), block=block)[0]["memplug"]
    assert memplug.peak_allocated_bytes <= budget_bytes < keep.peak_allocated_bytes
    assert memplug.to_host_bytes > 0 or memplug.flops > keep.flops


def test_expert_parallel_ranks_hold_fewer_experts_and_do_equal_work() -> None:
    alone, all_parameters = _estimated(RankLayout(), mixture=True)
    split, parameters = _estimated(RankLayout(expert=2), mixture=True)
    of_experts = 4 * 4 * 3 * DENSE["hidden_size"] * DENSE["intermediate_size"]
    assert all_parameters - parameters == of_experts // 2
    assert split["keep"].flops == pytest.approx(alone["keep"].flops)  # half the experts, for the tokens of two ranks
    names = {span.name for span in split["keep"].spans}
    assert "c10d::alltoall_base_" in names - {span.name for span in alone["keep"].spans}


@pytest.mark.long
def test_first_stage_holds_more_micro_batches_than_the_last() -> None:
    peaks = {
        (stage, count): _estimated(RankLayout(pipeline=2), stage=stage, micro_batches=count)[0]["keep"]
        for stage in (0, 1)
        for count in (1, 4)
    }
    activations = 2 * TOKENS * 2 * 10 * DENSE["hidden_size"]  # a lower bound: two layers in bf16
    first, last = (peaks[stage, 4].peak_allocated_bytes - peaks[stage, 1].peak_allocated_bytes for stage in (0, 1))
    assert first > activations > 2 * last >= 0
    assert peaks[0, 4].schedule_s == pytest.approx(4 * peaks[0, 1].schedule_s, rel=0.1)
    assert peaks[0, 4].schedule_s < peaks[0, 4].step_s and peaks[0, 4].bubble_s == 0


@pytest.mark.long
def test_context_parallel_ranks_share_all_work_equally() -> None:
    alone, all_parameters = _estimated(RankLayout(), ("keep", "selective"))
    split, parameters = _estimated(RankLayout(context=2), ("keep", "selective"))
    assert parameters == all_parameters
    for mode in alone:
        assert 2 * split[mode].flops == pytest.approx(alone[mode].flops)
    assert {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"} <= {span.name for span in split["keep"].spans}


@pytest.mark.long
def test_gathered_keys_and_values_of_a_layer_do_not_stay_on_the_device() -> None:
    """Capture attention's output: then this rank's recompute passes need no keys and values; other ranks' may."""
    block = {**WITHOUT_ARENA, "swap": {"enabled": False}, "tokenwise": {"alpha": 0.0, "min_offload_bytes": 4096}}
    grown_bytes = {}
    for mode in ("full", "memplug"):
        found = [_estimated(RankLayout(context=2), (mode,), layers=layers, block=block)[0][mode] for layers in (4, 8)]
        grown_bytes[mode] = found[1].peak_allocated_bytes - found[0].peak_allocated_bytes
    gathered_bytes = 4 * 2 * 2 * TOKENS * DENSE["hidden_size"] // 2  # four layers' keys and values of half the heads
    assert grown_bytes["memplug"] < grown_bytes["full"] + gathered_bytes / 2


@pytest.mark.long
def test_fp16_step_runs_the_optimizer_like_bf16() -> None:
    half, brain = (_estimated(RankLayout(), dtype=dtype)[0]["keep"] for dtype in ("fp16", "bf16"))
    adam = [sum(span.name.startswith("aten::_fused_adam") for span in each.spans) for each in (half, brain)]
    assert adam[0] == adam[1] > 0
