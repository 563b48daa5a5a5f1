"""Layers of Megatron-Core, of Transformer Engine's modules or of torch's and flash-attn's operators.

Megatron-Core's own `DotProductAttention` keeps a score of every pair of tokens for backward, O(s^2) memory. The
attention here keeps O(s), and torch's runs wherever torch does. Megatron-Core's own RMS norm refuses sequence
parallelism.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional


class _CausalAttention(nn.Module):
    """Causal attention of this rank's heads, used as `SelfAttentionSubmodules.core_attention`.

    Raises:
        ValueError: the configuration asks for context parallelism, windows, or scores scaled by the layer's number,
            which only Transformer Engine's attention supports.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **kwargs: Any):
        super().__init__()
        unsupported = {
            "context_parallel_size": config.context_parallel_size > 1,
            "window_size": config.window_size is not None,
            "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
        }
        for name in (name for name, asked in unsupported.items() if asked):
            raise ValueError(f"{name} is not supported by {type(self).__name__}")
        head_size = config.kv_channels
        self.dropout = config.attention_dropout
        self.scale = 1.0 / math.sqrt(head_size) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Return the attention of queries, keys and values.

        The attention mask is not read: attention is causal.

        Args:
            query: [s, b, heads, d].
            key: [s, b, groups, d].
            value: [s, b, groups, d].
            attention_mask: not read.
            attn_mask_type: not read.
            attention_bias: not supported.
            packed_seq_params: not supported.

        Returns:
            [s, b, heads * d].

        Raises:
            ValueError: there is a bias, or sequences are packed.
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise ValueError(f"a bias and packed sequences are not supported by {type(self).__name__}")
        return self.attend(query, key, value, self.dropout if self.training else 0.0).flatten(2)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
        """Return the attention, [s, b, heads, d]; arguments have the shapes of `forward`."""
        raise NotImplementedError


class ScaledDotProductAttention(_CausalAttention):
    """Attention by torch's operator, which chooses among its kernels."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
        """Return the attention: see `_CausalAttention.attend`."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.permute(2, 0, 1, 3)


class FlashAttention(_CausalAttention):
    """Attention by flash-attn's kernels: in bfloat16, on a GPU."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
        """Return the attention: see `_CausalAttention.attend`."""
        from flash_attn import flash_attn_func

        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        out = flash_attn_func(query, key, value, dropout_p=dropout, softmax_scale=self.scale, causal=True)
        return out.transpose(0, 1)


class RMSNorm(nn.RMSNorm):
    """Torch's RMS norm with Megatron-Core's constructor.

    It marks its weight for sequence parallelism: ranks that share a sequence add up the weight's gradients.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any):
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def block_spec(
    config: TransformerConfig, vp_stage: int | None = None, attention: str = "sdpa"
) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage and chunk, with experts if the configuration has any.

    Args:
        config: configuration of the model.
        vp_stage: number of the chunk, or None where a stage has only one chunk.
        attention: "sdpa" or "flash", or "te" for layers of Transformer Engine's modules.
    """
    fields = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
    }
    if attention == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        norm, layer = TENorm, get_gpt_layer_with_transformer_engine_spec(**fields)
    else:
        norm, layer = RMSNorm, get_gpt_layer_local_spec(**fields, normalization="RMSNorm")
        parts, of_attention = layer.submodules, layer.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        of_attention.core_attention = FlashAttention if attention == "flash" else ScaledDotProductAttention
        if config.qk_layernorm:
            of_attention.q_layernorm = of_attention.k_layernorm = norm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)
