"""How Megatron-Core splits a model: refused layouts, and each rank's part."""

from __future__ import annotations

from typing import Any

import pytest

from memplug.errors import EstimateError
from memplug.predict.estimator.layout import RankLayout
from memplug.predict.estimator.shapes import Shape
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
def test_layout_that_does_not_divide_the_model_is_refused_with_advice(
    shape: Shape, layout: dict[str, Any], said: str
) -> None:
    with pytest.raises(EstimateError, match=said):
        RankLayout(**layout).check(shape, shape.layers, 4096)


def test_sequence_parallel_size_must_divide_the_tokens_of_a_rank() -> None:
    with pytest.raises(EstimateError, match="--tensor, with --sequence, is 8, which does not divide a rank's tokens"):
        RankLayout(tensor=8, sequence=True).check(LLAMA, 80, 4092)
    RankLayout(tensor=8, sequence=True).check(LLAMA, 80, 4096)


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
def test_gpus_beyond_one_model_replica_are_data_parallel(
    layout: dict[str, Any], gpus: int, data: int, told: str
) -> None:
    made = RankLayout(**layout)
    made.check(MIXTRAL, 32, 4096)
    assert (made.gpus, made.data) == (gpus, data) and told in str(made)


def test_each_distinct_pipeline_stage_is_represented_by_one_rank() -> None:
    layout = RankLayout(gpus=16, tensor=2, pipeline=8)
    assert layout.stages == {0: 1, 1: 6, 7: 1} and [layout.rank(stage) for stage in layout.stages] == [0, 2, 14]
    assert RankLayout().stages == {0: 1} and RankLayout(pipeline=2).stages == {0: 1, 1: 1}
    assert layout.micro_batches == 16 and RankLayout(tensor=2).micro_batches == 1
