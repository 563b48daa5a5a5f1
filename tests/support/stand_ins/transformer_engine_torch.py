"""The kernels that Transformer Engine's Python calls, under the real module's names where it has one.

The real module is C++ (transformer_engine/pytorch/csrc). Here the stand-ins' C++ computes, and Python passes arguments
on and counts the runs of each kernel.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import torch
from stand_in_kernels import calls, draw_seeds, native

Scaling = native.Scaling


class FP8FwdTensors(enum.IntEnum):
    """Places of a module's forward tensors in its scales and amaxes."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5


class FP8BwdTensors(enum.IntEnum):
    """Places of a module's backward tensors."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3


def operand(tensor: Any, columnwise: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, int, bool]:
    """Return (elements, inverse scales or None, block, transposed) of a tensor or of quantized storage."""
    return tensor.operand(columnwise) if hasattr(tensor, "operand") else (tensor, None, 0, False)


@functools.cache
def get_cublas_workspace(device: torch.device) -> torch.Tensor:
    """Return the workspace that the first product makes and all keep; it is smaller than the real one, and unused."""
    return torch.empty(65536, dtype=torch.uint8, device=device)


def gemm(
    a: Any,
    b: Any,
    layout: str,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    with_bias_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multiply matrices; `native.gemm` (matmul.h) describes the layouts."""
    first, second = operand(a, columnwise=layout != "TN"), operand(b, columnwise=layout == "NT")
    rows, columns = first[0].numel() // (first[0].shape[-1] or 1), first[0].shape[-1]
    k = columns if (layout == "TN") != first[3] else rows
    get_cublas_workspace(second[0].device)
    calls.ran("gemm", 2 * first[0].numel() * (second[0].numel() // (k or 1)))
    return native.gemm(first, second, layout, dtype, out, bias, accumulate, with_bias_grad)


def norm_fwd(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, zero_centered: bool, rms: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the normalized rows, their means (None for RMS norm), and their inverse deviations."""
    calls.ran("norm_forward")
    return native.norm_forward(x, weight, bias, eps, zero_centered, rms)


def norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor | None,
    rsigma: torch.Tensor,
    weight: torch.Tensor,
    zero_centered: bool,
    rms: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return gradients of the rows, the weight, and the bias (None for RMS norm)."""
    calls.ran("norm_backward")
    return native.norm_backward(dy, x, mu, rsigma, weight, zero_centered, rms)


def activation_fwd(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Apply GELU, SwiGLU and so on, by TE's names."""
    calls.ran("activation_forward")
    return native.activation_forward(x, kind)


def activation_bwd(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the gradient of `activation_fwd`'s input."""
    calls.ran("activation_backward")
    return native.activation_backward(dy, x, kind)


def attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Any, *, flops: int, dropout: float = 0.0, stats: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, the logarithms of the sums of exponentials, and the state of dropout."""
    calls.ran("attention_forward", flops)
    seeds = draw_seeds(q, dropout > 0)
    out, sums = native.attention_forward(q, k, v, seeds, how, stats)
    return out, sums, seeds


def attention_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    seeds: torch.Tensor,
    how: Any,
    *,
    flops: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of q, k and v."""
    calls.ran("attention_backward", 5 * flops // 2)
    return native.attention_backward(dout, q, k, v, out, sums, seeds, how, None)


def rope(
    x: torch.Tensor, freqs: torch.Tensor, tensor_format: str, interleaved: bool, turn: int, starts: torch.Tensor | None
) -> torch.Tensor:
    """Apply a rotary embedding; `turn` is -1 for backward."""
    calls.ran("rope")
    return native.rotate(x, freqs, tensor_format, interleaved, turn, starts)


def gather_rows(x: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """Return rows that are the sums of the rows `sources[i]`; -1 is none."""
    calls.ran("gather_rows")
    return native.gather_rows(x.contiguous(), sources)


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    dtype: torch.dtype,
    scaling: Any,
    block: int = 0,
    transposed: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return elements in eight bits, and inverse scales; in the memory of `out`, if given."""
    calls.ran("quantize")
    return native.quantize(x, scale, amax, dtype, scaling, block, transposed, out)


def dequantize(storage: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of quantized storage."""
    calls.ran("dequantize")
    return native.dequantize(operand(storage), dtype)


def fp8_transpose(data: torch.Tensor) -> torch.Tensor:
    """Transpose elements in eight bits."""
    calls.ran("transpose")
    return native.transpose(data)


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    amax_compute_algo: str,
    fp8_max: float,
    margin: float,
) -> None:
    """End a step of delayed scaling; the real function takes the format's name, this one its largest number."""
    calls.ran("update_scales")
    native.update_scales(amax_reduction_buffer, amax_histories, scales, amax_compute_algo, fp8_max, int(margin))
