"""Rotary embedding by a kernel."""

from __future__ import annotations

from typing import Any

import torch
from stand_in_kernels import calls, native


class ApplyRotaryEmb(torch.autograd.Function):
    """Rotates; saves cosines and sines, but not its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        calls.forward("ApplyRotaryEmb")
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x, cos, sin, interleaved, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _turn(grad.contiguous(), *ctx.saved_tensors, ctx.interleaved, -1), None, None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, turn: int) -> torch.Tensor:
    calls.ran("rotary")
    angles = torch.atan2(sin.float(), cos.float())
    angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return native.rotate(x, angles.contiguous(), "bshd", interleaved, turn, None)


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    conjugate: bool = False,
) -> torch.Tensor:
    """Rotate the first r elements of each head of [b, s, h, d]; cos and sin are [s, r / 2]."""
    if inplace or conjugate or cu_seqlens is not None or not isinstance(seqlen_offsets, int) or seqlen_offsets:
        raise NotImplementedError("the stand-in of flash-attn turns new tensors of unpacked sequences from their start")
    return ApplyRotaryEmb.apply(x, cos[: x.shape[1]], sin[: x.shape[1]], interleaved)
