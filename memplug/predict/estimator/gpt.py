"""Makes a Megatron-Core GPTModel of a given shape without Transformer Engine: attention and norms are torch's.

Megatron-Core's own `DotProductAttention` saves a score for each pair of tokens; torch's attention saves O(tokens), as
Transformer Engine's does. Megatron-Core's fused operators are off, so each operator is a kernel of torch's, as in
examples/megatron_llama2. Call this file's functions inside `rank_of` (megatron.py), which imports Megatron-Core.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memplug.predict.estimator.layout import RankLayout
from memplug.predict.estimator.shapes import Shape


class Attention(nn.Module):
    """Causal attention over this rank's heads and tokens; used as `SelfAttentionSubmodules.core_attention`."""

    def __init__(self, config: Any, **kwargs: Any):
        super().__init__()
        self.context = config.context_parallel_size

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Return the attention of the queries to the keys and values.

        Args:
            query: [s, b, heads, d].
            key: [s, b, groups, d].
            value: [s, b, groups, d].
            *args: Ignored.
            **kwargs: Ignored.

        Returns:
            The output: [s, b, heads * d].
        """
        if self.context > 1:
            return _GatheringAttention.apply(query, key, value)
        query, key, value = map(_heads_first, (query, key, value))
        shared = query.shape[1] != key.shape[1]
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        return _tokens_first(out).flatten(2)


class _GatheringAttention(torch.autograd.Function):
    """Attention of this rank's tokens to the tokens of all context-parallel ranks, on the virtual device.

    As in Transformer Engine with `cp_comm_type="all_gather"`, keys and values are gathered in forward and again in
    backward; the gathered tensors are not saved. Each rank has one piece near the sequence's beginning and one near its
    end, so that causal attention costs the same on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        gathered = _heads_first(query), _heads_first(_gathered(key)), _heads_first(_gathered(value))
        out, sums, *_, seed, offset, _ = _ATTENTION(*gathered, is_causal=True)
        ctx.save_for_backward(query, key, value, out, sums, seed, offset)
        return _tokens_first(out).flatten(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, out, sums, seed, offset = ctx.saved_tensors
        gathered = _heads_first(query), _heads_first(_gathered(key)), _heads_first(_gathered(value))
        gradient = _heads_first(gradient.unflatten(2, query.shape[2:]))
        lengths = None, None, len(query), gathered[1].shape[2]
        wanted = [True, True, True, False]
        given = gradient, *gathered, None, wanted, out, sums, *lengths, 0.0, True, seed, offset
        of_query, *of_others, _ = _ATTENTION_BACKWARD(*given)
        return _tokens_first(of_query), *(_scattered(_tokens_first(each)) for each in of_others)


_ATTENTION = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """Permute [s, b, heads, d] to [b, heads, s, d]."""
    return tensor.permute(1, 2, 0, 3)


def _tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    """Permute [b, heads, s, d] to [s, b, heads, d]."""
    return tensor.permute(2, 0, 1, 3)


def _gathered(part: torch.Tensor) -> torch.Tensor:
    """All-gather a tensor over the context-parallel ranks along its first dimension, tokens."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    whole = part.new_empty((len(part) * group.size(), *part.shape[1:]))
    torch.distributed.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def _scattered(whole: torch.Tensor) -> torch.Tensor:
    """Reduce-scatter a tensor over the context-parallel ranks along its first dimension, tokens."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    part = whole.new_empty((len(whole) // group.size(), *whole.shape[1:]))
    torch.distributed.reduce_scatter_tensor(part, whole.contiguous(), group=group)
    return part


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm with the constructor that Megatron-Core expects.

    With sequence parallelism it marks its weight, so that Megatron-Core sums the weight's gradients over ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def config_of(shape: Shape, layers: int, layout: RankLayout, dtype: torch.dtype) -> Any:
    """Return a `TransformerConfig` of the whole model.

    Args:
        shape: The model's shape.
        layers: Layers of the whole model.
        layout: How the model is split over the ranks.
        dtype: The dtype of parameters and activations.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = shape.fields
    heads = fields["num_attention_heads"]
    whole = {"expert_tensor_parallel_size": 1} if layout.expert > 1 else {}  # each expert is on one rank
    unfused = ("bias_activation", "bias_dropout", "masked_softmax", "gradient_accumulation")
    return TransformerConfig(
        num_layers=layers,
        hidden_size=fields["hidden_size"],
        ffn_hidden_size=fields["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=fields.get("num_key_value_heads", heads),
        kv_channels=shape.head_size,
        qk_layernorm=shape.normalizes_heads,
        layernorm_epsilon=fields.get("rms_norm_eps", 1e-6),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        context_parallel_size=layout.context,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        perform_initialization=False,  # the virtual device has no values
        deallocate_pipeline_outputs=True,
        apply_rope_fusion=False,
        **{f"{name}_fusion": False for name in unfused},
        **whole,
        **(_mixture(shape) if shape.is_mixture else {}),
    )


def _mixture(shape: Shape) -> dict[str, Any]:
    """Return the fields of `TransformerConfig` that only a mixture of experts sets.

    Each expert is a module of its own; Transformer Engine or grouped_gemm would compute all experts of a rank at once.
    """
    return {
        "num_moe_experts": shape.fields["num_local_experts"],
        "moe_router_topk": shape.fields["num_experts_per_tok"],
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": shape.fields.get("router_aux_loss_coef", 0.001),
        "moe_token_dispatcher_type": "alltoall",
    }


def make_model(config: Any, shape: Shape, seq_len: int, *, first: bool, last: bool) -> nn.Module:
    """Make this rank's part of the model.

    Args:
        config: The model's `TransformerConfig`.
        shape: The model's shape.
        seq_len: Tokens in a whole sequence, which context-parallel ranks share.
        first: Whether this rank has the embedding.
        last: Whether this rank has the head and the loss.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    model = GPTModel(
        config,
        _block_spec(config),
        vocab_size=shape.fields["vocab_size"],
        max_sequence_length=seq_len,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope",
        rotary_base=int(shape.fields.get("rope_theta", 10000)),
        share_embeddings_and_output_weights=shape.fields.get("tie_word_embeddings", False),
    )
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


def _block_spec(config: Any) -> Any:
    """Return the specification of this pipeline stage's layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = Attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
