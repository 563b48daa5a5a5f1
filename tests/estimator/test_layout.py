"""How Megatron-Core splits a model: which splits are refused, and what a step of all stages takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memplug.device.virtual import Hardware
from memplug.errors import BudgetError, EstimateError
from memplug.estimator.estimate import Estimate, ModeEstimate
from memplug.estimator.layout import Layout
from memplug.estimator.shapes import Shape
from memplug.estimator.stages import of_all
from tests.support.folders import ROOT

pytest.importorskip("transformers")
LLAMA, MIXTRAL = (Shape.read(ROOT / "configs" / "models" / f"{name}.yaml") for name in ("70b", "mixtral_8x7b"))


@pytest.mark.parametrize(
    ("shape", "layout", "said"),
    [
        (LLAMA, {"tensor": 3}, "--tensor is 3, which does not divide the model's num_attention_heads, 64"),
        (Shape({**LLAMA.fields, "mlp_bias": True}), {}, "the model has mlp_bias"),
        (LLAMA, {"tensor": 16}, "num_key_value_heads, 8\nWhat to do: .*1, 2, 4, 8"),
        (LLAMA, {"gpus": 8, "tensor": 4, "pipeline": 4}, "is 16, which does not divide --gpus, 8"),
        (LLAMA, {"pipeline": 3}, "--pipeline is 3, which does not divide the number of layers, 80"),
        (LLAMA, {"sequence": True}, "Give --tensor 2"),
        (LLAMA, {"context": 3}, "twice --context is 6, which does not divide --seq-len, 4096"),
        (LLAMA, {"expert": 2}, "the model has no experts"),
        (MIXTRAL, {"expert": 3}, "--expert is 3, which does not divide the number of experts, 8"),
        (MIXTRAL, {"gpus": 4, "expert": 8}, "--expert × --pipeline is 8, which does not divide --gpus, 4"),
        (MIXTRAL, {"tensor": 2}, "Add --sequence"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused_with_what_would(
    shape: Shape, layout: dict[str, Any], said: str
) -> None:
    with pytest.raises(EstimateError, match=said):
        Layout(**layout).check(shape, shape.layers, 4096)


def test_a_rank_has_whole_tokens_of_what_sequence_parallel_ranks_share() -> None:
    with pytest.raises(EstimateError, match="--tensor, with --sequence, is 8, which does not divide a rank's tokens"):
        Layout(tensor=8, sequence=True).check(LLAMA, 80, 4092)
    Layout(tensor=8, sequence=True).check(LLAMA, 80, 4096)


@pytest.mark.parametrize(
    ("layout", "gpus", "data", "told"),
    [
        ({}, 1, 1, ""),
        ({"tensor": 8, "sequence": True}, 8, 1, "tensor 8, sequence"),
        ({"gpus": 16, "tensor": 4, "sequence": True, "pipeline": 2}, 16, 2, "tensor 4, sequence, pipeline 2, data 2"),
        ({"expert": 8}, 8, 8, "expert 8, data 8"),
        ({"tensor": 2, "sequence": True, "context": 2, "expert": 8, "pipeline": 2}, 16, 2, "expert 8, context 2, data"),
    ],
)
def test_what_is_left_of_the_ranks_is_data_parallel(layout: dict[str, Any], gpus: int, data: int, told: str) -> None:
    made = Layout(**layout)
    made.check(MIXTRAL, 32, 4096)
    assert (made.gpus, made.data) == (gpus, data) and told in str(made)


def test_a_rank_of_each_stage_that_differs_stands_for_all() -> None:
    layout = Layout(gpus=16, tensor=2, pipeline=8)
    assert layout.stages == {0: 1, 1: 6, 7: 1} and [layout.rank(stage) for stage in layout.stages] == [0, 2, 14]
    assert Layout().stages == {0: 1} and Layout(pipeline=2).stages == {0: 1, 1: 1}
    assert layout.micro_batches == 16 and Layout(tensor=2).micro_batches == 1


# -- a step of all stages ----------------------------------------------------------------------------------------------


def _stage(step_s: float, nbytes: int, **fields: Any) -> ModeEstimate:
    numbers = dict.fromkeys(("host_bytes", "to_host_bytes", "to_device_bytes"), 0)
    return ModeEstimate(
        mode="keep",
        step_s=step_s,
        schedule_s=step_s - 1.0,
        flops=fields.pop("flops", 1e12),
        peak_allocated_bytes=nbytes,
        peak_reserved_bytes=nbytes + 1,
        arena_reserved_bytes=fields.pop("arena_bytes", None),
        bound="compute",
        fits=nbytes < 100,
        **numbers,
    )


def _pipeline(
    stages: dict[int, ModeEstimate], pipeline: int, micro_batches: int, impossible: dict[int, float] | None = None
) -> Estimate:
    errors = {stage: {"memplug": BudgetError(gib, stage, 1.0)} for stage, gib in (impossible or {}).items()}
    given = {
        stage: Estimate(Hardware.named("h200"), {"keep": each}, errors.get(stage, {})) for stage, each in stages.items()
    }
    return of_all(given, Layout(pipeline=pipeline), micro_batches)


@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_of_stages_that_are_alike_the_bubble_is_one_less_than_stages_over_micro_batches(micro_batches: int) -> None:
    found = _pipeline({0: _stage(9.0, 1), 1: _stage(9.0, 1), 3: _stage(9.0, 1)}, 4, micro_batches)["keep"]
    assert found.bubble_s == pytest.approx(8.0 * 3 / micro_batches)  # of the schedule, and not of the optimizer
    assert found.step_s == pytest.approx(1.0 + 8.0 * (micro_batches + 3) / micro_batches)


def test_the_slowest_stage_sets_the_pace_and_each_number_is_of_the_stage_with_the_most() -> None:
    first = dataclasses.replace(_stage(5.0, 120), to_host_bytes=7)
    found = _pipeline({0: first, 1: _stage(5.0, 80), 3: _stage(9.0, 60, flops=5e12, arena_bytes=70)}, 4, 8)
    keep = found["keep"]
    assert keep.step_s == pytest.approx(9.0 + 3 * 4.0 / 8)
    assert (keep.peak_allocated_bytes, keep.peak_reserved_bytes, keep.arena_reserved_bytes) == (120, 121, 70)
    assert keep.to_host_bytes == 7 and not keep.fits and keep.flops == 2e12
    assert {stage: each["keep"].peak_allocated_bytes for stage, each in found.stages.items()} == {0: 120, 1: 80, 3: 60}


def test_what_is_impossible_on_one_stage_is_so_with_the_least_that_all_need() -> None:
    stages = {stage: _stage(5.0, 1) for stage in (0, 1)}
    found = _pipeline(stages, 2, 4, {0: 3.0, 1: 2.0})
    assert found.impossible["memplug"].least_gib == 3.0 and list(found) == ["keep"]
