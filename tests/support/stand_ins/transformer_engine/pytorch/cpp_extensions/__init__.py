"""Matrix products under the real names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformer_engine_torch as tex


def general_gemm(
    A: Any,
    B: Any,
    out_dtype: torch.dtype | None = None,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    grad: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """Return the product and, with `grad` and a bias, the bias's gradient."""
    dtype = out_dtype or (B.dtype if isinstance(B, torch.Tensor) else torch.float32)
    added = None if grad else bias
    result, bias_grad = tex.gemm(
        A, B, layout, dtype, out=out, bias=added, accumulate=accumulate, with_bias_grad=grad and bias is not None
    )
    return result, bias_grad, None, None


def general_grouped_gemm(
    A: Sequence[Any],
    B: Sequence[Any],
    out: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype,
    *,
    layout: str = "TN",
    bias: Sequence[torch.Tensor] | None = None,
    accumulate: bool = False,
    with_bias_grad: bool = False,
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Run one product for each expert, and return all results."""
    return [
        tex.gemm(
            a,
            b,
            layout,
            out_dtype,
            out=to,
            bias=bias[i] if bias else None,
            accumulate=accumulate,
            with_bias_grad=with_bias_grad,
        )
        for i, (a, b, to) in enumerate(zip(A, B, out, strict=True))
    ]
