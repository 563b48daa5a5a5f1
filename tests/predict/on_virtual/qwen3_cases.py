"""Qwen3 of Hugging Face and of Megatron-Core on the virtual device: a head size of its own, and norms of heads."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import memplug
from memplug.predict.estimator.estimate import estimate_training
from memplug.predict.estimator.layout import RankLayout
from memplug.predict.estimator.megatron import MegatronTraining, rank_of
from memplug.predict.estimator.request import EstimateRequest
from memplug.predict.estimator.result import Estimate
from memplug.predict.estimator.shapes import Shape
from memplug.predict.estimator.workload import Workload
from memplug.predict.virtual import GpuProfile
from tests.support.virtual_devices import H200

FIELDS = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 96,
}
QWEN, LLAMA = Shape({**FIELDS, "model_type": "qwen3"}), Shape(FIELDS)
MODES = ("keep", "full", "memplug")
BLOCK = {"enabled": True, "arena": {"enabled": False}, "tokenwise": {"alpha": 1, "min_offload_bytes": 1024}}


def _workload(shape: Shape) -> Workload:
    return Workload(shape=shape, layers=2, seq_len=1024)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _parameters() -> int:
    """Return the number of parameters of Hugging Face's own class."""
    import transformers

    with torch.device("meta"):
        return _count(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**FIELDS)))


def _of_hugging_face(shape: Shape) -> Estimate:
    job = _workload(shape)
    return memplug.estimate(job.make_model, job.inputs, BLOCK, "h200", MODES, make_optimizer=job.make_optimizer)


def _of_megatron(shape: Shape, layout: RankLayout) -> tuple[Estimate, int]:
    """Return Megatron-Core's estimate, and this rank's number of parameters."""
    job, parameters = _workload(shape), []

    def make_training() -> MegatronTraining:
        training = MegatronTraining(job, layout, 1)
        parameters.append(_count(training.model))
        return training

    rank = functools.partial(rank_of, layout, 0, job, 1)
    request = EstimateRequest.of(BLOCK, GpuProfile.read(H200), MODES)
    return estimate_training(make_training, request, rank=rank), parameters[0]


def test_hugging_face_qwen3_has_the_flops_of_a_llama_and_more_memory() -> None:
    with torch.device("meta"):
        assert _count(_workload(QWEN).make_model()) == _parameters()
    ours, llama = (_of_hugging_face(shape) for shape in (QWEN, LLAMA))
    assert ours["keep"].flops == llama["keep"].flops and ours["full"].flops == llama["full"].flops
    assert ours["keep"].peak_allocated_bytes > llama["keep"].peak_allocated_bytes
    assert ours["memplug"].to_host_bytes == ours["memplug"].to_device_bytes > 0


@pytest.mark.parametrize("layout", [RankLayout(), RankLayout(tensor=2, sequence=True)], ids=str)
def test_megatron_qwen3_ranks_split_all_parameters_but_those_of_norms(layout: RankLayout) -> None:
    pytest.importorskip("megatron.core")
    found, parameters = _of_megatron(QWEN, layout)
    norms = 2 * (2 * FIELDS["hidden_size"] + 2 * FIELDS["head_dim"]) + FIELDS["hidden_size"]
    assert (parameters - norms) * layout.tensor + norms == _parameters()
    llama, without = _of_megatron(LLAMA, layout)
    assert parameters - without == 2 * 2 * FIELDS["head_dim"]
    assert found["keep"].flops == llama["keep"].flops and found["keep"].step_s > llama["keep"].step_s
    assert found["memplug"].to_host_bytes == found["memplug"].to_device_bytes > 0
