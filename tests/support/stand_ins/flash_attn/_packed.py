"""flash-attn's functions that take q, k and v in one tensor."""

from __future__ import annotations

from typing import Any

import torch
from stand_in_kernels import calls


class FlashAttnQKVPackedFunc(torch.autograd.Function):
    """Saves views of its input, the output, logarithms of sums, and dropout's state; returns one packed gradient."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, lengths: Any, options: tuple, deterministic: bool) -> torch.Tensor:
        calls.forward("FlashAttnQKVPackedFunc" if lengths is None else "FlashAttnVarlenQKVPackedFunc")
        q, k, v = (x.detach() for x in qkv.unbind(-3))
        operators = torch.ops.flash_attn
        if lengths is None:
            out, lse, _, rng_state = operators._flash_attn_forward(q, k, v, *options, False)
        else:
            out, lse, _, rng_state = operators._flash_attn_varlen_forward(q, k, v, *lengths, *options, False)
        ctx.save_for_backward(q, k, v, out, lse, rng_state, *(lengths or ())[:2])
        ctx.longest = None if lengths is None else lengths[2:]
        ctx.options, ctx.deterministic = options, deterministic
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, rng_state, *starts = ctx.saved_tensors
        dqkv = torch.empty((*q.shape[:-2], 3, *q.shape[-2:]), dtype=q.dtype, device=q.device)
        grads, operators = dqkv.unbind(-3), torch.ops.flash_attn
        tail = *ctx.options, ctx.deterministic
        if ctx.longest is None:
            operators._flash_attn_backward(dout, q, k, v, out, lse, *grads, *tail, rng_state=rng_state)
        else:
            lengths = *starts, *ctx.longest
            operators._flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *lengths, *tail, rng_state=rng_state)
        return dqkv, None, None, None


def apply(
    qkv: torch.Tensor,
    lengths: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    deterministic: bool,
) -> torch.Tensor:
    """Run attention of [b, s, 3, h, d], or of [t, 3, h, d] with lengths."""
    if qkv.shape[-1] % 8:
        raise NotImplementedError("the stand-in of flash-attn packs heads of a multiple of 8 alone")
    scale = qkv.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options = dropout_p, scale, causal, *window_size, 0.0, None
    return FlashAttnQKVPackedFunc.apply(qkv, lengths, options, deterministic)
