"""Projections around attention: self-attention over sbhd or bshd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.module import LayerNormLinear, Linear
from transformer_engine.pytorch.utils import divide, refuse


class MultiheadAttention(torch.nn.Module):
    """A decoder's self-attention, with those of the real module's arguments that it needs.

    The projection's output has the queries, key and value of one group of heads after another.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable | None = None,
        output_layer_init_method: Callable | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: Any = None,
        qkv_format: str = "sbhd",
        rotary_pos_interleaved: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        refuse(attention_type=attention_type != "self" and attention_type, **others)
        tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        self.head_size = kv_channels or divide(hidden_size, num_attention_heads)
        groups = num_gqa_groups or num_attention_heads
        self.heads, self.groups = divide(num_attention_heads, tp_size), divide(groups, tp_size)
        self.rotary_pos_interleaved, self.return_bias = rotary_pos_interleaved, return_bias
        common = {
            "sequence_parallel": sequence_parallel,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "get_rng_state_tracker": get_rng_state_tracker,
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
        }
        out = self.head_size * (num_attention_heads + 2 * groups)
        column = {"init_method": init_method, "parallel_mode": "column" if set_parallel_mode else None, **common}
        if input_layernorm:
            norm = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
            self.layernorm_qkv = LayerNormLinear(hidden_size, out, eps=layernorm_epsilon, **norm, **column)
        else:
            self.qkv = Linear(hidden_size, out, **column)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.head_size,
            num_gqa_groups=groups,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            sequence_parallel=sequence_parallel,
            tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker,
            tp_group=tp_group,
            layer_number=layer_number,
        )
        self.proj = Linear(
            self.head_size * num_attention_heads,
            hidden_size,
            init_method=output_layer_init_method,
            return_bias=return_bias,
            parallel_mode="row" if set_parallel_mode else None,
            **common,
        )

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int], cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the ranks whose tokens make up the sequence."""
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Run self-attention of [s, b, h] or [b, s, h]; return the same shape, and the bias if asked for."""
        refuse(**others)
        projection = self.layernorm_qkv if hasattr(self, "layernorm_qkv") else self.qkv
        mixed = projection(hidden_states, is_first_microbatch=is_first_microbatch)
        share = self.heads // self.groups
        mixed = mixed.view(*mixed.shape[:-1], self.groups, share + 2, self.head_size)
        query, key, value = mixed.split([share, 1, 1], dim=-2)
        query = query.reshape(*query.shape[:2], self.heads, self.head_size)
        key, value = key.squeeze(-2), value.squeeze(-2)
        if rotary_pos_emb is not None:
            form = self.core_attention.qkv_format
            turn = {"tensor_format": form, "interleaved": self.rotary_pos_interleaved, "fused": True}
            query, key = (apply_rotary_pos_emb(x, rotary_pos_emb, **turn) for x in (query, key))
        context = self.core_attention(query, key, value, checkpoint_core_attention=checkpoint_core_attention)
        return self.proj(context, is_first_microbatch=is_first_microbatch)
