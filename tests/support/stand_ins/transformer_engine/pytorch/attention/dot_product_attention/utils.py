"""The arguments of one call of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from stand_in_kernels import native


@dataclass(slots=True, kw_only=True)
class CoreArgs:
    """The arguments of one call, except for q, k and v."""

    qkv_format: str
    softmax_scale: float
    causal: bool
    bottom_right: bool = False
    left: int = -1
    """How many earlier tokens a token sees, -1: all."""
    dropout_p: float = 0.0
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None

    def how(self, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None) -> Any:
        """Return the kernel's arguments; packed sequences have the given starts, by default this object's."""
        packed = self.qkv_format == "thd"
        return native.Attention(
            self.qkv_format,
            self.softmax_scale,
            self.causal,
            bottom_right=self.bottom_right,
            left=self.left,
            dropout=self.dropout_p,
            query_starts=(self.cu_seqlens_q if cu_seqlens_q is None else cu_seqlens_q) if packed else None,
            key_starts=(self.cu_seqlens_kv if cu_seqlens_kv is None else cu_seqlens_kv) if packed else None,
        )

    def flops(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
        """Return the operations of both products in forward; every packed sequence counts like the longest."""
        if self.qkv_format == "thd":
            pairs = q.shape[0] * (self.max_seqlen_kv or k.shape[0])
        else:
            s = self.qkv_format.index("s")
            pairs = q.shape[1 - s] * q.shape[s] * k.shape[s]
        return 2 * pairs * q.shape[-2] * (q.shape[-1] + v.shape[-1]) // (2 if self.causal else 1)
