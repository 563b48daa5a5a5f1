"""Builds a model of Megatron-Core and its optimizer, from a shape in configs/models and a way to split it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from layers import block_spec
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The split of a model over ranks; the remaining ranks are data-parallel."""

    tensor: int = 1
    sequence: bool = False
    """Whether tensor-parallel ranks split the other parts of a layer by tokens."""
    pipeline: int = 1
    chunks: int = 1
    """Chunks of each pipeline stage; more than one selects the interleaved schedule."""
    context: int = 1
    """Ranks that share a sequence: their attention exchanges keys and values, as Transformer Engine's does."""
    expert: int = 1
    dispatcher: str = "alltoall"
    """How tokens reach the ranks of their experts: "alltoall" or "allgather"."""


def initialize(parallel: Parallel, seed: int) -> None:
    """Make the process groups and random states of all ranks; torch.distributed is initialized already."""
    parallel_state.initialize_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.chunks if parallel.chunks > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1 if parallel.expert > 1 else None,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # Megatron-Core 0.16 reads it, but defines it only with Transformer Engine


def share_of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's tokens of each sequence, [batch, tokens]; all tokens where ranks share no sequences."""
    # without a group, newer versions use all ranks
    given = {"cp_group": parallel_state.get_context_parallel_group(), "is_hybrid_cp": False}
    asked = inspect.signature(get_batch_on_this_cp_rank).parameters
    return get_batch_on_this_cp_rank(batch, **{name: value for name, value in given.items() if name in asked})


def transformer_config(
    shape: dict[str, Any], parallel: Parallel, dtype: torch.dtype, **fields: Any
) -> TransformerConfig:
    """Return Megatron-Core's configuration of a model.

    Args:
        shape: fields of Hugging Face's LlamaConfig, MixtralConfig or Qwen3Config, as in configs/models.
        parallel: how the model is split.
        dtype: dtype of the parameters.
        fields: further or other fields of TransformerConfig.
    """
    experts = {}
    if "num_local_experts" in shape:
        experts = {
            "num_moe_experts": shape["num_local_experts"],
            "moe_router_topk": shape["num_experts_per_tok"],
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": shape.get("router_aux_loss_coef", 0.02),
            "moe_token_dispatcher_type": parallel.dispatcher,
        }
    heads = {"kv_channels": shape["head_dim"]} if shape.get("head_dim") else {}
    if shape.get("model_type") == "qwen3":
        heads["qk_layernorm"] = True
    common = dict(
        num_layers=shape["num_hidden_layers"],
        hidden_size=shape["hidden_size"],
        ffn_hidden_size=shape["intermediate_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_key_value_heads"],
        layernorm_epsilon=shape["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.chunks if parallel.chunks > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1 if parallel.expert > 1 else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # not on the CPU: gloo may still be sending an output whose memory this would release
        deallocate_pipeline_outputs=torch.cuda.is_available(),
        # with two stages, batched messages of the interleaved schedule could be taken for one another
        overlap_p2p_comm=parallel.chunks > 1,
        batch_p2p_comm=parallel.chunks == 1,
        # off: fused kernels need Transformer Engine, Apex or a compiler
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return TransformerConfig(**{**common, **experts, **heads, **fields})


def build_chunks(
    config: TransformerConfig,
    shape: dict[str, Any],
    seq_len: int,
    distributed_optimizer: bool,
    attention: str = "sdpa",
) -> list[DistributedDataParallel]:
    """Return this rank's part of the model: one module, or one per chunk of the interleaved schedule.

    Args:
        config: configuration of the model.
        shape: see `transformer_config`.
        seq_len: tokens of a sequence.
        distributed_optimizer: whether data-parallel ranks share the optimizer's state.
        attention: see `layers.block_spec`.
    """
    chunks = config.virtual_pipeline_model_parallel_size
    data_parallel = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=True,
        overlap_param_gather=distributed_optimizer,
        grad_reduce_in_fp32=True,
    )
    modules = []
    for chunk in [None] if chunks is None else range(chunks):
        module = GPTModel(
            config,
            block_spec(config, chunk, attention),
            vocab_size=shape["vocab_size"],
            max_sequence_length=seq_len,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            position_embedding_type="rope",
            rotary_base=int(shape.get("rope_theta", 10000)),
            share_embeddings_and_output_weights=False,
            vp_stage=chunk,
        ).to(torch.cuda.current_device())
        modules.append(Float16Module(config, module) if config.bf16 else module)
    wrapped = [
        DistributedDataParallel(config, data_parallel, module, disable_bucketing=number > 0)
        for number, module in enumerate(modules)
    ]
    single = len(wrapped) == 1
    config.no_sync_func = wrapped[0].no_sync if single else [module.no_sync for module in wrapped]
    config.grad_sync_func = wrapped[0].start_grad_sync if single else [module.start_grad_sync for module in wrapped]
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def build_optimizer(
    chunks: list[DistributedDataParallel], dtype: torch.dtype, learning_rate: float, distributed: bool
) -> MegatronOptimizer:
    """Return AdamW over all chunks; data-parallel ranks share its state where `distributed`."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=learning_rate,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
        overlap_param_gather=distributed,
    )
    return get_megatron_optimizer(config, chunks)
