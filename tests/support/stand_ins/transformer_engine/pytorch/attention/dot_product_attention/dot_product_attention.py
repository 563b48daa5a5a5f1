"""Scaled dot-product attention."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.attention.dot_product_attention.backends import (
    FlashAttention,
    FusedAttention,
    UnfusedDotProductAttention,
)
from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import ContextParallel
from transformer_engine.pytorch.attention.dot_product_attention.utils import CoreArgs
from transformer_engine.pytorch.distributed import checkpoint
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.utils import refuse


class DotProductAttention(TransformerEngineBaseModule):
    """Takes the real module's arguments, and refuses those that it does not support. It computes nothing in FP8."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        refuse(softmax_type=softmax_type != "vanilla" and softmax_type, return_max_logit=return_max_logit)
        self.qkv_format, self.window_size = qkv_format, window_size
        self.attn_mask_type = attn_mask_type.replace(",", "_").replace("causal_padding", "padding_causal")
        self.take_tensor_parallel_group(tp_group, tp_size)
        self.get_rng_state_tracker, self.layer_number = get_rng_state_tracker, layer_number or 1
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.attention_type, self.attention_dropout = attention_type, attention_dropout
        head_size = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1.0 / math.sqrt(head_size) if softmax_scale is None else softmax_scale
        tracked = get_rng_state_tracker is not None and not sequence_parallel
        self.attention_dropout_ctx = get_rng_state_tracker().fork if tracked else contextlib.nullcontext
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.flash_attention, self.fused_attention = FlashAttention(), FusedAttention()
        self.unfused_attention = UnfusedDotProductAttention()

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int] | None, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the ranks whose tokens make up the sequence; None: this rank has all of them."""
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def _context_parallel(self) -> ContextParallel | None:
        if self.cp_group is None:
            return None
        if isinstance(self.cp_group, list):
            raise NotImplementedError("the stand-in's context parallelism has one group of ranks")
        found = ContextParallel(self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type)
        return found if found.size > 1 else None

    def _backend(self, query: torch.Tensor) -> torch.nn.Module:
        """Return the first back end that Transformer Engine's variables allow: cuDNN's stand-in first, as on Hopper."""
        if os.environ.get("NVTE_FUSED_ATTN", "1") != "0":
            return self.fused_attention
        if os.environ.get("NVTE_FLASH_ATTN", "1") != "0" and query.dtype != torch.float32:
            return self.flash_attention
        return self.unfused_attention

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
    ) -> torch.Tensor:
        """Run attention of [s, b, h, d], [b, s, h, d] or packed [t, h, d], by the format; return heads side by side."""
        format_ = qkv_format or self.qkv_format
        mask = (attn_mask_type or self.attn_mask_type).replace(",", "_").replace("causal_padding", "padding_causal")
        packed = format_ == "thd"
        refuse(
            attn_mask_type=("arbitrary" in mask or ("padding" in mask and not packed)) and mask,
            core_attention_bias=core_attention_bias is not None,
            alibi_slopes=alibi_slopes is not None,
            inference_params=inference_params,
            fp8_output=fp8_output,
        )
        window = window_size or self.window_size or (-1, -1)
        refuse(window_size=window[1] > 0 and window)
        args = CoreArgs(
            qkv_format=format_,
            softmax_scale=self.softmax_scale,
            causal="causal" in mask,
            bottom_right="bottom_right" in mask,
            left=window[0],
            dropout_p=self.attention_dropout if self.training else 0.0,
            cu_seqlens_q=cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded,
            cu_seqlens_kv=cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
        )
        backend, cp = self._backend(query_layer), self._context_parallel()
        # the state of FP8 is kept and copied for recomputes, though no kernel reads it
        around = self.around_forward(query_layer, num_gemms=3, allow_non_contiguous=True)
        with around as query_layer, self.attention_dropout_ctx():
            if checkpoint_core_attention:
                tracker = self.get_rng_state_tracker
                return checkpoint(backend, query_layer, key_layer, value_layer, args, cp, get_rng_state_tracker=tracker)
            return backend(query_layer, key_layer, value_layer, args, cp)
