"""flash-attn 3: custom operators forward and backward, within autograd Functions. No FP8, no cache."""

from __future__ import annotations

from typing import Any

import torch
from stand_in_kernels import calls, draw_seeds, native

_WHERE = ("cpu", "cuda")  # the real operators exist on CUDA alone


def _how(scale: float, causal: bool, left: int, right: int, starts: tuple[Any, Any]) -> Any:
    if right > 0:
        raise NotImplementedError(f"the stand-in of flash-attn 3 does not do window_size_right={right}")
    packed = starts[0] is not None
    return native.Attention(
        "thd" if packed else "bshd",
        scale,
        causal or right == 0,
        bottom_right=True,
        left=left,
        query_starts=starts[0],
        key_starts=starts[1],
    )


@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=(), device_types=_WHERE)
def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    out_: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    seqlens_rotary: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run attention of [b, s, h, d] or [t, h, d].

    Returns:
        Out, logarithms of sums [b, h, s] or [h, t], and two empty tensors.
    """
    others = (k_new, v_new, qv, out_, seqused_q, seqused_k, page_table, leftpad_k, rotary_cos, q_descale)
    if attention_chunk or softcap or any(tensor is not None for tensor in others):
        raise NotImplementedError("the stand-in of flash-attn 3 does plain attention alone")
    calls.ran("flash_3_forward", 4 * q.numel() * (max_seqlen_k or k.shape[-3]) // (2 if causal else 1))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    how = _how(scale, causal, window_size_left, window_size_right, (cu_seqlens_q, cu_seqlens_k))
    out, lse = native.attention_forward(q, k, v, draw_seeds(q, False), how, False)
    return out, lse, q.new_empty(0), q.new_empty(0)


@_flash_attn_forward.register_fake
def _(q: torch.Tensor, *others: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32), q.new_empty(0), q.new_empty(0)


@torch.library.custom_op("flash_attn_3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"), device_types=_WHERE)
def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sequed_q: torch.Tensor | None = None,
    sequed_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Fill dq, dk and dv; return uninitialized memory, as large as the real operator's sums."""
    calls.ran("flash_3_backward", 10 * q.numel() * (max_seqlen_k or k.shape[-3]) // (2 if is_causal else 1))
    how = _how(softmax_scale, is_causal, window_size_left, window_size_right, (cu_seqlens_q, cu_seqlens_k))
    seeds = draw_seeds(q, False)
    native.attention_backward(dout.contiguous(), q, k, v, out, softmax_lse, seeds, how, (dq, dk, dv))
    return torch.empty_like(softmax_lse)


@_flash_attn_backward.register_fake
def _(dout: torch.Tensor, q: Any, k: Any, v: Any, out: Any, softmax_lse: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(softmax_lse)


class FlashAttnFunc(torch.autograd.Function):
    """Saves q, k, v, out and logarithms of sums."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, softmax_scale: Any, causal: bool, window: tuple[int, int], softmax: bool
    ) -> Any:
        calls.forward("FlashAttnFunc (3)")
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        ctx.options = scale, causal, *window
        names = "softmax_scale", "causal", "window_size_left", "window_size_right"
        out, lse, *_ = _flash_attn_forward(q, k, v, **dict(zip(names, ctx.options, strict=True)))
        ctx.save_for_backward(q, k, v, out, lse)
        return (out, lse) if softmax else out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, out, lse, *(None,) * 6, *grads, *ctx.options)
        return *grads, None, None, None, None


class FlashAttnVarlenFunc(torch.autograd.Function):
    """Runs attention of packed sequences; saves what `FlashAttnFunc` saves, the sequences' starts, and None twice.

    flash-attn saves the counts of used tokens in place of None.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, lengths: tuple, softmax_scale: Any, causal: bool, window: tuple[int, int]
    ) -> torch.Tensor:
        calls.forward("FlashAttnVarlenFunc (3)")
        cu_seqlens_q, cu_seqlens_k, *ctx.longest = lengths
        ctx.options = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, causal, *window
        names = "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal", "window_size_left", "window_size_right"
        options = dict(zip(names, (*ctx.longest, *ctx.options), strict=True))
        out, lse, *_ = _flash_attn_forward(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, None, None)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *starts = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, out, lse, *starts, *ctx.longest, *grads, *ctx.options)
        return *grads, None, None, None, None


def _refuse(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value not in (None, False, 0, 1):  # 1: num_splits
            raise NotImplementedError(f"the stand-in of flash-attn 3 does not do {name}={value!r}")


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_attn_probs: bool = False,
    **others: Any,
) -> Any:
    """Run attention of [b, s, h, d]; the output has q's shape."""
    _refuse({name: value for name, value in others.items() if name != "deterministic"})
    return FlashAttnFunc.apply(q, k, v, softmax_scale, causal, tuple(window_size), return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **others: Any,
) -> torch.Tensor:
    """Run attention of packed sequences [t, h, d]; the output has q's shape."""
    _refuse({name: value for name, value in others.items() if name != "deterministic"})
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return FlashAttnVarlenFunc.apply(q, k, v, lengths, softmax_scale, causal, tuple(window_size))


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Any:
    """Raise NotImplementedError: training generates nothing."""
    raise NotImplementedError("the stand-in of flash-attn 3 has no cache of keys and values")
