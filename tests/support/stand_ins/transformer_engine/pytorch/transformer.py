"""A decoder layer."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.attention import MultiheadAttention
from transformer_engine.pytorch.module import LayerNormMLP
from transformer_engine.pytorch.utils import refuse


class TransformerLayer(torch.nn.Module):
    """A decoder layer, with those of the real layer's arguments that the layer and its parts need."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        layer_number: int | None = None,
        self_attn_mask_type: str = "causal",
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Any = None,
        sequence_parallel: bool = False,
        set_parallel_mode: bool = False,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: Any = None,
        attn_input_format: str = "sbhd",
        **others: Any,
    ) -> None:
        super().__init__()
        refuse(**others)
        self.hidden_dropout = hidden_dropout
        common = {
            "tp_group": tp_group,
            "tp_size": tp_size,
            "params_dtype": params_dtype,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "sequence_parallel": sequence_parallel,
            "set_parallel_mode": set_parallel_mode,
            "bias": bias,
            "normalization": normalization,
            "device": device,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            attention_dropout=attention_dropout,
            layernorm_epsilon=layernorm_epsilon,
            layer_number=layer_number,
            attn_mask_type=self_attn_mask_type,
            num_gqa_groups=num_gqa_groups,
            input_layernorm=True,
            qkv_format=attn_input_format,
            **common,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, activation=activation, **common
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Run the layer on [s, b, h] or [b, s, h]; return the same shape."""
        refuse(**others)
        attended = self.self_attention(
            hidden_states,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            rotary_pos_emb=rotary_pos_emb,
        )
        dropout = torch.nn.functional.dropout
        hidden_states = hidden_states + dropout(attended, self.hidden_dropout, self.training)
        made = self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
        return hidden_states + dropout(made, self.hidden_dropout, self.training)
