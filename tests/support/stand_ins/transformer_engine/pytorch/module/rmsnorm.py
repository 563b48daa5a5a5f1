"""The module of `ops.RMSNorm`."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch import ops


class RMSNorm(ops.RMSNorm):
    """Adds Megatron-Core's arguments, and its mark on parameters whose gradients sequence-parallel ranks sum."""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        size = hidden_size if normalized_shape is None else normalized_shape
        kwargs.setdefault("dtype", params_dtype)
        super().__init__(size, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs)
        self.sequence_parallel = sequence_parallel
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel
