"""The memory that the recipes estimate for a model, and its number of parameters."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.folders import ROOT
from tests.support.recipes import checks, layout, memory, settings

SHAPES = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs/models").glob("*.yaml")}


def build(shape: dict[str, Any]) -> torch.nn.Module:
    """Build Hugging Face's model."""
    if "num_local_experts" in shape:
        return MixtralForCausalLM(MixtralConfig(**shape))
    if shape.get("model_type") == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    return LlamaForCausalLM(LlamaConfig(**shape))


@pytest.mark.parametrize("name", SHAPES)
def test_parameter_count_by_shape_equals_that_of_the_model(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model = build(shape)
    counted = memory.count(shape)
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    own = [sum(one.numel() for one in module.parameters(recurse=False)) for module in model.modules()]
    assert counted.largest == max(own), "as DeepSpeed's estimator defines the largest layer"


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_tied_head_counts_once(model_type: str) -> None:
    shape = {**SHAPES["tiny"], "model_type": model_type, "tie_word_embeddings": True, "head_dim": 48}
    model = build(shape)
    assert memory.count(shape).total == sum(parameter.numel() for parameter in model.parameters())


def test_sharing_sequences_divides_memory_of_logits_but_not_of_states() -> None:
    alone, shared = (megatron_estimate("7b", 8, "--distributed-optimizer", "--context", size) for size in ("1", "4"))
    assert shared.states_bytes == alone.states_bytes and shared.logits_bytes == alone.logits_bytes / 4
    assert "context 4, data 2" in shared.notes["on"]
    argv = ["--seq-len", "1024", "--check", "8", "--context"]
    alone, shared = (
        settings.read(settings.parse_args([*argv, size]), checks.Ranks(count=8)).estimate for size in ("1", "4")
    )
    assert shared.states_bytes == alone.states_bytes and shared.logits_bytes == alone.logits_bytes / 4
    assert "ZeRO 1, context 4" in shared.notes["on"]


def deepspeed_states(name: str, ranks: int, **zero: Any) -> memory.Estimate:
    return memory.deepspeed_estimate(SHAPES[name], {"zero_optimization": zero}, ranks, 1, logits=0)


def test_memory_under_zero_equals_deepspeeds_own_estimate() -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage_3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as stage_2

    total, cpu = 6_738_415_616, {"device": "cpu"}
    assert deepspeed_states("7b", 8, stage=0).states_bytes == 20 * total
    assert deepspeed_states("7b", 8, stage=1).states_bytes == 6 * total
    assert deepspeed_states("7b", 8, stage=2).states_bytes == stage_2(total, 8, 1, False)[1]
    offloaded = deepspeed_states("7b", 8, stage=2, offload_optimizer=cpu)
    assert (offloaded.host_bytes, offloaded.states_bytes) == stage_2(total, 8, 1, True)
    largest = 32000 * 4096
    assert deepspeed_states("7b", 8, stage=3).states_bytes == stage_3(total, largest, 8, 1, False, False)[1]
    offloaded = deepspeed_states("7b", 8, stage=3, offload_optimizer=cpu, offload_param=cpu)
    assert (offloaded.host_bytes, offloaded.states_bytes) == stage_3(total, largest, 8, 1, True, True)[:2]


def megatron_estimate(name: str, ranks: int, *argv: str) -> memory.Estimate:
    args = layout.parse_args(["--bf16", "--check", *argv])
    return layout.estimate(args, SHAPES[name], ranks)


def megatron_states(name: str, ranks: int, *argv: str) -> float:
    return megatron_estimate(name, ranks, *argv).states_bytes


def test_megatron_states_take_18_or_6_plus_shared_12_bytes_per_parameter() -> None:
    total = 6_738_415_616
    assert megatron_states("7b", 8) == 18 * total
    assert megatron_states("7b", 8, "--distributed-optimizer") == 7.5 * total
    split = ["--tensor", "2", "--distributed-optimizer"]
    norms = 65 * 4096
    assert megatron_states("7b", 8, *split) == 9 * ((total - norms) / 2 + norms)
    experts = 32 * 8 * 3 * 4096 * 14336
    rest = memory.count(SHAPES["mixtral_8x7b"]).total - experts
    spread = ["--expert", "8", "--distributed-optimizer"]
    assert megatron_states("mixtral_8x7b", 16, *spread) == round(experts / 8 * (6 + 12 / 2) + rest * (6 + 12 / 16))


COUNT = """
import sys, torch
sys.path[:0] = [{folder!r}]
import cpu
cpu.pretend()
import model
from torch.testing._internal.distributed.fake_pg import FakeStore
new_group = torch.distributed.new_group
torch.distributed.new_group = lambda *args, backend=None, **fields: new_group(*args, **fields)  # without gloo
for ranks, rank, shape, fields in {cases!r}:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    parallel = model.Parallel(**fields)
    model.initialize(parallel, 0)
    config = model.transformer_config(shape, parallel, torch.float32)
    chunks = model.build_chunks(config, shape, 64, False)
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    experts = sum(weight.numel() for weight in weights if not getattr(weight, "allreduce", True))
    print("counted", experts, sum(weight.numel() for weight in weights) - experts)
    model.parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
"""
TINY, MIXTURE = SHAPES["tiny"], SHAPES["mixtral_tiny"]
QWEN3 = {**TINY, "model_type": "qwen3", "head_dim": 48}
LAYOUTS = [
    (1, 0, TINY, {}),
    (4, 0, TINY, {"tensor": 2, "pipeline": 2, "sequence": True}),
    (4, 3, TINY, {"tensor": 2, "pipeline": 2, "sequence": True}),
    (4, 0, TINY, {"pipeline": 2, "chunks": 2}),
    (8, 7, TINY, {"pipeline": 4}),
    (8, 0, MIXTURE, {"tensor": 2, "sequence": True, "expert": 4, "pipeline": 2}),
    (8, 7, MIXTURE, {"tensor": 2, "sequence": True, "expert": 4, "pipeline": 2}),
    (4, 3, QWEN3, {"tensor": 2, "pipeline": 2, "sequence": True}),
]


@pytest.mark.long
def test_parameter_count_of_a_rank_equals_that_of_megatrons_model() -> None:
    pytest.importorskip("megatron.core")
    script = COUNT.format(cases=LAYOUTS, folder=str(ROOT / "examples/megatron_llama2"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    built = [tuple(map(int, line.split()[1:])) for line in done.stdout.splitlines() if line.startswith("counted")]
    assert len(built) == len(LAYOUTS)
    for (ranks, rank, shape, fields), found in zip(LAYOUTS, built, strict=True):
        argv = [word for name, value in fields.items() for word in (f"--{name}", str(value)) if word != "True"]
        args = layout.parse_args([*argv, "--check", str(ranks)])
        stage = rank // (ranks // args.pipeline)
        assert layout.parameters_of_rank(args, shape, stage) == found, fields
