"""flash-attn's functions: custom operators forward and backward, within autograd Functions."""

from __future__ import annotations

from typing import Any

import torch
from stand_in_kernels import calls, draw_seeds, native

from flash_attn import _packed
from flash_attn._packed import FlashAttnQKVPackedFunc

__all__ = [
    "FlashAttnFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
_WHERE = ("cpu", "cuda")  # the real operators exist on CUDA alone


def _refuse(**asked: Any) -> None:
    for name, value in asked.items():
        if value:
            raise NotImplementedError(f"the stand-in of flash-attn does not do {name}={value!r}")


def _how(dropout_p: float, softmax_scale: float, causal: bool, left: int, right: int, starts: Any = None) -> Any:
    _refuse(window_size_right=right > 0 and right)
    packed = {"query_starts": starts[0], "key_starts": starts[1]} if starts else {}
    return native.Attention(
        "thd" if starts else "bshd",
        softmax_scale,
        causal or right == 0,
        bottom_right=True,
        left=left,
        dropout=dropout_p,
        **packed,
    )


def _flops(q: torch.Tensor, keys: int, causal: bool) -> int:
    return 4 * q.numel() * keys // (2 if causal else 1)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Any, dropout_p: float, flops: int) -> Any:
    calls.ran("flash_forward", flops)
    rng_state = draw_seeds(q, dropout_p > 0)
    out, softmax_lse = native.attention_forward(q, k, v, rng_state, how, False)
    return out, softmax_lse, q.new_empty(0), rng_state


def _padded(length: int) -> int:
    return -(-length // 128) * 128


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), device_types=_WHERE)
def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run attention of [b, s, h, d].

    Returns:
        Out, logarithms of sums [b, h, s], an empty tensor, and the state of dropout.
    """
    _refuse(softcap=softcap, alibi_slopes=alibi_slopes is not None, return_softmax=return_softmax)
    how = _how(dropout_p, softmax_scale, causal, window_size_left, window_size_right)
    return _forward(q, k, v, how, dropout_p, _flops(q, k.shape[1], causal))


@_flash_attn_forward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    return torch.empty_like(q), lse, q.new_empty(0), torch.empty((2,), dtype=torch.int64, device=q.device)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=(), device_types=_WHERE)
def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run attention of packed sequences [t, h, d]; return the same as `_flash_attn_forward`, with sums [h, t]."""
    _refuse(softcap=softcap, alibi_slopes=alibi_slopes is not None, return_softmax=return_softmax)
    _refuse(block_table=block_table is not None, leftpad_k=leftpad_k is not None, seqused_k=seqused_k is not None)
    starts = cu_seqlens_q, cu_seqlens_k
    how = _how(dropout_p, softmax_scale, causal, window_size_left, window_size_right, starts)
    return _forward(q, k, v, how, dropout_p, _flops(q, max_seqlen_k, causal))


@_flash_attn_varlen_forward.register_fake
def _(q: torch.Tensor, *others: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    return torch.empty_like(q), lse, q.new_empty(0), torch.empty((2,), dtype=torch.int64, device=q.device)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"), device_types=_WHERE)
def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill dq, dk and dv; return uninitialized memory, as large as the real operator's sums."""
    how = _how(dropout_p, softmax_scale, causal, window_size_left, window_size_right)
    calls.ran("flash_backward", 5 * _flops(q, k.shape[1], causal) // 2)
    seeds = draw_seeds(q, False) if rng_state is None else rng_state
    native.attention_backward(dout.contiguous(), q, k, v, out, softmax_lse, seeds, how, (dq, dk, dv))
    return torch.empty((q.shape[0], q.shape[2], _padded(q.shape[1])), dtype=torch.float32, device=q.device)


@_flash_attn_backward.register_fake
def _(dout: torch.Tensor, q: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    return torch.empty((q.shape[0], q.shape[2], _padded(q.shape[1])), dtype=torch.float32, device=q.device)


@torch.library.custom_op(
    "flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"), device_types=_WHERE
)
def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Fill the gradients of packed sequences, like `_flash_attn_backward`."""
    starts = cu_seqlens_q, cu_seqlens_k
    how = _how(dropout_p, softmax_scale, causal, window_size_left, window_size_right, starts)
    calls.ran("flash_backward", 5 * _flops(q, max_seqlen_k, causal) // 2)
    seeds = draw_seeds(q, False) if rng_state is None else rng_state
    native.attention_backward(dout.contiguous(), q, k, v, out, softmax_lse, seeds, how, (dq, dk, dv))
    return torch.empty((q.shape[1], q.shape[0] + 128), dtype=torch.float32, device=q.device)


@_flash_attn_varlen_backward.register_fake
def _(dout: torch.Tensor, q: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    return torch.empty((q.shape[1], q.shape[0] + 128), dtype=torch.float32, device=q.device)


def _heads_of_eight(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Pad heads with zeros to a size that is a multiple of 8."""
    more = -tensors[0].shape[-1] % 8
    return [torch.nn.functional.pad(x, [0, more]) if more else x for x in tensors]


def _contiguous_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


class FlashAttnFunc(torch.autograd.Function):
    """Saves q, k, v and out (with heads of a multiple of 8), logarithms of sums, and the state of dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Any,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool,
    ) -> Any:
        calls.forward("FlashAttnFunc")
        scale, size = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, q.shape[-1]
        needed = is_grad_enabled and any(x.requires_grad for x in (q, k, v))
        q, k, v = _contiguous_rows(*_heads_of_eight(q, k, v))
        ctx.options = dropout_p, scale, causal, *window_size, softcap, alibi_slopes
        operator = torch.ops.flash_attn._flash_attn_forward
        out, lse, mask, rng_state = operator(q, k, v, *ctx.options, return_softmax and dropout_p > 0)
        if needed:
            ctx.save_for_backward(q, k, v, out, lse, rng_state)
            ctx.deterministic = deterministic
        out = out[..., :size]
        return (out, lse, mask) if return_softmax else out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, rng_state = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        (padded,) = _heads_of_eight(dout)
        operator = torch.ops.flash_attn._flash_attn_backward
        operator(padded, q, k, v, out, lse, *grads, *ctx.options, ctx.deterministic, rng_state=rng_state)
        return *(grad[..., : dout.shape[-1]] for grad in grads), *(None,) * 9


class FlashAttnVarlenFunc(torch.autograd.Function):
    """Runs attention of packed sequences; saves what `FlashAttnFunc` saves, and the sequences' starts."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Any,
        deterministic: bool,
        return_softmax: bool,
        block_table: Any,
        is_grad_enabled: bool,
    ) -> Any:
        calls.forward("FlashAttnVarlenFunc")
        scale, size = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, q.shape[-1]
        needed = is_grad_enabled and any(x.requires_grad for x in (q, k, v))
        q, k, v = _contiguous_rows(*_heads_of_eight(q, k, v))
        ctx.longest, ctx.options = (
            (max_seqlen_q, max_seqlen_k),
            (dropout_p, scale, causal, *window_size, softcap, alibi_slopes),
        )
        starts = cu_seqlens_q, cu_seqlens_k
        operator = torch.ops.flash_attn._flash_attn_varlen_forward
        wanted = return_softmax and dropout_p > 0
        out, lse, mask, rng_state = operator(q, k, v, *starts, *ctx.longest, *ctx.options, wanted, block_table)
        if needed:
            ctx.save_for_backward(q, k, v, out, lse, *starts, rng_state)
            ctx.deterministic = deterministic
        out = out[..., :size]
        return (out, lse, mask) if return_softmax else out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *starts, rng_state = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        (padded,) = _heads_of_eight(dout)
        operator = torch.ops.flash_attn._flash_attn_varlen_backward
        lengths = *starts, *ctx.longest
        operator(padded, q, k, v, out, lse, *grads, *lengths, *ctx.options, ctx.deterministic, rng_state=rng_state)
        return *(grad[..., : dout.shape[-1]] for grad in grads), *(None,) * 14


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Run attention of [b, s, h, d], with fewer heads in k and v; the output has q's shape."""
    options = softcap, alibi_slopes, deterministic, return_attn_probs
    grad = torch.is_grad_enabled()
    return FlashAttnFunc.apply(q, k, v, dropout_p, softmax_scale, causal, tuple(window_size), *options, grad)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Run attention of packed sequences [t, h, d]; the output has q's shape."""
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options = softcap, alibi_slopes, deterministic, return_attn_probs, block_table
    arguments = dropout_p, softmax_scale, causal, tuple(window_size), *options, torch.is_grad_enabled()
    return FlashAttnVarlenFunc.apply(q, k, v, *lengths, *arguments)


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Any:
    """Raise NotImplementedError: training generates nothing."""
    raise NotImplementedError("the stand-in of flash-attn has no cache of keys and values")


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> torch.Tensor:
    """Run attention of [b, s, 3, h, d]; return [b, s, h, d]."""
    return _packed.apply(qkv, None, dropout_p, softmax_scale, causal, window_size, deterministic)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> torch.Tensor:
    """Run attention of packed [t, 3, h, d]; return [t, h, d]."""
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return _packed.apply(qkv, lengths, dropout_p, softmax_scale, causal, window_size, deterministic)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run `FlashAttnFunc` on q [b, s, h, d] and kv [b, s, 2, h, d]; the real package has a function of its own."""
    return flash_attn_func(q, *kv.unbind(-3), *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run `FlashAttnVarlenFunc` on q [t, h, d] and kv [t, 2, h, d]."""
    return flash_attn_varlen_func(q, *kv.unbind(-3), *args, **kwargs)
