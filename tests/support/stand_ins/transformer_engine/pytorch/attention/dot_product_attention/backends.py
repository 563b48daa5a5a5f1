"""The back ends of attention within a rank: stand-ins for cuDNN (FusedAttention) and flash-attn, and torch's."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformer_engine_torch as tex
from stand_in_kernels import calls

from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import attn_forward_func_with_cp
from transformer_engine.pytorch.attention.dot_product_attention.utils import CoreArgs
from transformer_engine.pytorch.tensor import prepare_for_saving, restore_from_saved


class FusedAttnFunc(torch.autograd.Function):
    """Saves the tensors of the real function, after four None in the places that FP8 attention fills.

    These are q, k, v, out, the starts of packed sequences (of the tokens in memory, and with padding), the softmax's
    statistics [b, h, s, 1], and the state of dropout, int64[2].
    """

    @staticmethod
    def forward(ctx: Any, is_training: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, args: CoreArgs) -> Any:
        calls.forward("FusedAttnFunc")
        how = args.how()
        flops = args.flops(q, k, v)
        out, stats, rng_state = tex.attention_fwd(q, k, v, how, flops=flops, dropout=args.dropout_p)
        tensors, ctx.tensor_objects = prepare_for_saving(
            *(None, None, None, None),
            *(q, k, v, out),
            *(args.cu_seqlens_q, args.cu_seqlens_kv, args.cu_seqlens_q_padded, args.cu_seqlens_kv_padded),
            *(stats, rng_state),
        )
        ctx.save_for_backward(*tensors)
        ctx.args, ctx.flops = args, flops
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        saved = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
        q, k, v, out, cu_seqlens_q, cu_seqlens_kv, _, _, stats, rng_state = saved[4:]
        how = ctx.args.how(cu_seqlens_q, cu_seqlens_kv)
        grads = tex.attention_bwd(d_out.contiguous(), q, k, v, out, stats, rng_state, how, flops=ctx.flops)
        return None, *grads, None


class FusedAttention(torch.nn.Module):
    """The kernel in cuDNN's place: takes any format, and float as well, which cuDNN does not."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, args: CoreArgs, cp: Any = None) -> Any:
        """Run attention on tensors of `args.qkv_format`; return heads side by side."""
        if cp is not None:
            output = attn_forward_func_with_cp(self.training, q, k, v, args, cp)
        else:
            output = FusedAttnFunc.apply(self.training, q, k, v, args)
        return output.view(*output.shape[:-2], -1)


class FlashAttention(torch.nn.Module):
    """Runs the functions of flash-attn's stand-in, in flash-attn's own formats."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, args: CoreArgs, cp: Any = None) -> Any:
        """Run attention on tensors of `args.qkv_format`; return heads side by side."""
        from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

        if cp is not None:
            raise NotImplementedError("the stand-in does context parallelism by FusedAttention alone")
        turned = args.qkv_format == "sbhd"
        if turned:
            q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        window = args.left, 0 if args.causal else -1
        common = {"softmax_scale": args.softmax_scale, "causal": args.causal, "window_size": window}
        if args.qkv_format == "thd":
            lengths = args.cu_seqlens_q, args.cu_seqlens_kv, args.max_seqlen_q, args.max_seqlen_kv
            output = flash_attn_varlen_func(q, k, v, *lengths, args.dropout_p, **common)
        else:
            output = flash_attn_func(q, k, v, args.dropout_p, **common)
        if turned:
            output = output.transpose(0, 1)
        return output.reshape(*output.shape[:-2], -1)


class UnfusedDotProductAttention(torch.nn.Module):
    """Runs torch's operators, and keeps a score of every pair of tokens."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, args: CoreArgs, cp: Any = None) -> Any:
        """Run attention of [s, b, h, d] or [b, s, h, d]; return heads side by side."""
        if cp is not None or args.qkv_format == "thd" or args.left >= 0 or args.bottom_right:
            raise NotImplementedError("the stand-in's unfused attention is plain: causal or not, nothing packed")
        s = args.qkv_format.index("s")
        q, k, v = (x.permute(1 - s, 2, s, 3) for x in (q, k, v))
        share = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * args.softmax_scale
        if args.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        weights = torch.nn.functional.dropout(scores.softmax(-1), args.dropout_p, self.training)
        output = torch.matmul(weights, v).permute(*((2, 0) if s == 0 else (0, 2)), 1, 3)
        return output.reshape(*output.shape[:-2], -1)
