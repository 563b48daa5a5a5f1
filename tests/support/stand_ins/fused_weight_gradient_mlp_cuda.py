"""A stand-in for Apex's kernels that add a weight's gradient to a buffer (see README.md)."""

from __future__ import annotations

import torch
from stand_in_kernels import calls, native


def wgrad_gemm_accum_fp32(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add grad_output[rows, out]^T total_input[rows, in] to main_grad[out, in]."""
    calls.ran("wgrad_gemm_accum", 2 * total_input.numel() * grad_output.shape[-1])
    operands = [(x.contiguous(), None, 0, False) for x in (total_input, grad_output)]
    native.gemm(*operands, "NT", main_grad.dtype, main_grad, None, True, False)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
