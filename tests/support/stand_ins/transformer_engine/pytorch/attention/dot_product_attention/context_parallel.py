"""Attention over the tokens of all context-parallel ranks.

A causal sequence is cut into 2 n chunks for n ranks. Rank r has chunks r and 2 n - 1 - r, so that all ranks have equal
work; Megatron-Core's `get_batch_on_this_cp_rank` gives each rank these chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine_torch as tex
from stand_in_kernels import calls

from transformer_engine.pytorch.attention.dot_product_attention.utils import CoreArgs


@dataclass(slots=True)
class ContextParallel:
    """The ranks that share a sequence, and how they communicate."""

    group: Any
    global_ranks: list[int]
    stream: Any
    comm_type: str

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Return this rank's place."""
        return dist.get_rank(self.group)


def attn_forward_func_with_cp(
    is_training: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, args: CoreArgs, cp: ContextParallel
) -> torch.Tensor:
    """Run attention over the tokens of all ranks; the ranks communicate by `cp.comm_type`."""
    refused = {
        "packed sequences": args.qkv_format == "thd",
        "dropout": args.dropout_p > 0,
        "windows": args.left >= 0,
        "a causal mask at the bottom right": args.bottom_right,
    }
    for name in (name for name, asked in refused.items() if asked):
        raise NotImplementedError(f"the stand-in's context parallelism does not do {name}")
    functions = {
        "p2p": AttnFuncWithCPAndKVP2P,
        "all_gather": AttnFuncWithCPAndKVAllGather,
        "a2a": AttnFuncWithCPAndQKVOA2A,
    }
    if cp.comm_type not in functions:
        raise NotImplementedError(f"the stand-in's context parallelism does not do cp_comm_type={cp.comm_type!r}")
    return functions[cp.comm_type].apply(is_training, q, k, v, args, cp)


def _partial(args: CoreArgs, causal: bool) -> CoreArgs:
    return replace(args, causal=causal)


def _forward(args: CoreArgs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tex.attention_fwd(q, k, v, args.how(), flops=args.flops(q, k, v), stats=False)


def _backward(args: CoreArgs, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seeds: Any) -> tuple:
    return tex.attention_bwd(grad, q, k, v, out, lse, seeds, args.how(), flops=args.flops(q, k, v))


def _half(x: torch.Tensor, s: int, which: int) -> torch.Tensor:
    return x.narrow(s, which * (x.shape[s] // 2), x.shape[s] // 2)


class _Step:
    """A rank's work with another rank's keys: rows of q, tokens of k and v, and whether the mask is causal."""

    def __init__(self, args: CoreArgs, rank: int, source: int):
        self.s = args.qkv_format.index("s")
        self.half_q = args.causal and source > rank
        self.half_kv = args.causal and source < rank
        self.args = _partial(args, args.causal and source == rank)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of q, or of a tensor like it, that see these keys."""
        return _half(x, self.s, 1).contiguous() if self.half_q else x

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens of k or v that the rows see."""
        return _half(x, self.s, 0).contiguous() if self.half_kv else x

    def sums(self, lse: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of the sums [b, h, s] for these rows."""
        return _half(lse, 2, 1).contiguous() if self.half_q else lse

    def add_rows(self, to: torch.Tensor, grad: torch.Tensor) -> None:
        """Add the gradient of these rows to the gradient of all rows."""
        (_half(to, self.s, 1) if self.half_q else to).add_(grad)

    def add_tokens(self, to: torch.Tensor, grad: torch.Tensor) -> None:
        """Add the gradient of these tokens to the gradient of all tokens."""
        (_half(to, self.s, 0) if self.half_kv else to).add_(grad)


def flash_attn_p2p_communicate(
    rank: int, send_tensor: torch.Tensor, send_dst: int, recv_tensor: torch.Tensor, recv_src: int, cp_group: Any
) -> list[Any]:
    """Run one step of the ring; even ranks list the send before the receive."""
    ops = [
        dist.P2POp(dist.isend, send_tensor, send_dst, cp_group),
        dist.P2POp(dist.irecv, recv_tensor, recv_src, cp_group),
    ]
    return dist.batch_isend_irecv(ops if rank % 2 == 0 else ops[::-1])


class AttnFuncWithCPAndKVP2P(torch.autograd.Function):
    """Sends keys and values around a ring; in each step a rank attends to those that it holds.

    Every other step runs on a second stream.

    Saves, after three None in FP8's places: q, the last keys and values, out, the logarithms of the sums, two None in
    the places of packed sequences' starts, and a state of dropout for each step. Backward's ring turns the other way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        is_training: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        args: CoreArgs,
        cp: ContextParallel,
    ) -> torch.Tensor:
        calls.forward("AttnFuncWithCPAndKVP2P")
        size, rank, s = cp.size, cp.rank, args.qkv_format.index("s")
        held = torch.stack([k.contiguous(), v.contiguous()]) if k.shape == v.shape else None
        if held is None:
            raise NotImplementedError("the stand-in's context parallelism needs values as large as keys")
        send, receive = cp.global_ranks[(rank + 1) % size], cp.global_ranks[(rank - 1) % size]
        steps, waiting = [], []
        second = _fork(q, cp)
        for i in range(size):
            for work in waiting:
                work.wait()
            if i + 1 < size:
                coming = torch.empty_like(held)
                waiting = flash_attn_p2p_communicate(rank, held, send, coming, receive, cp.group)
            step = _Step(args, rank, (rank - i) % size)
            with second(i):
                steps.append((step, *_forward(step.args, step.rows(q), *map(step.tokens, held))))
            if i + 1 < size:
                held = coming  # the pending send still holds the old tensor
        _join(q, cp)
        lse = steps[0][2].double()
        for step, _, its, _ in steps[1:]:
            rows = _half(lse, 2, 1) if step.half_q else lse
            rows.copy_(torch.logaddexp(rows, its.double()))
        out = torch.zeros_like(q, dtype=torch.float32)
        for step, part, its, _ in steps:
            factor = torch.exp(its.double() - step.sums(lse)).float()  # [b, h, s]
            step.add_rows(out, part.float() * factor.permute(*((2, 0) if s == 0 else (0, 2)), 1).unsqueeze(-1))
        out, lse = out.to(q.dtype), lse.float()
        seeds = [seeds for *_, seeds in steps]
        ctx.save_for_backward(None, None, None, q, held, out, lse, None, None, *seeds)
        ctx.args, ctx.cp = args, cp
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        args, cp = ctx.args, ctx.cp
        q, held, out, lse, _, _, *seeds = ctx.saved_tensors[3:]
        size, rank = cp.size, cp.rank
        dout, dq = dout.contiguous(), torch.zeros_like(q, dtype=torch.float32)
        grads = torch.zeros_like(held, dtype=torch.float32)
        send, receive = cp.global_ranks[(rank - 1) % size], cp.global_ranks[(rank + 1) % size]
        for i in range(size):
            step = _Step(args, rank, (rank + 1 + i) % size)
            waiting = []
            if i + 1 < size:
                coming = torch.empty_like(held)
                waiting = flash_attn_p2p_communicate(rank, held, send, coming, receive, cp.group)
            its = _backward(
                step.args, step.rows(dout), step.rows(q), *map(step.tokens, held), step.rows(out), step.sums(lse),
                seeds[size - 1 - i],
            )  # fmt: skip
            step.add_rows(dq, its[0].float())
            for to, grad in zip(grads, its[1:], strict=True):
                step.add_tokens(to, grad.float())
            for work in waiting:
                work.wait()
            if i + 1 < size:
                held, summed = coming, torch.empty_like(grads)
                for work in flash_attn_p2p_communicate(rank, grads, send, summed, receive, cp.group):
                    work.wait()
                grads = summed
        dk, dv = grads.to(held.dtype)
        return None, dq.to(q.dtype), dk, dv, None, None


def _fork(q: torch.Tensor, cp: ContextParallel) -> Callable[[int], Any]:
    """Return a function that makes the stream context of a step: every other step runs on the second stream.

    Before such a step the second stream waits for all work that the current stream has queued.
    """
    if not q.is_cuda or cp.stream is None:
        return lambda i: contextlib.nullcontext()

    def stream(i: int) -> Any:
        if i % 2 == 0:
            return contextlib.nullcontext()
        cp.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(cp.stream)

    return stream


def _join(q: torch.Tensor, cp: ContextParallel) -> None:
    if q.is_cuda and cp.stream is not None:
        torch.cuda.current_stream().wait_stream(cp.stream)


def _in_order(parts: list[torch.Tensor], s: int, causal: bool) -> torch.Tensor:
    """Return all ranks' tokens in the sequence's order."""
    if not causal:
        return torch.cat(parts, dim=s)
    halves = [_half(part, s, 0) for part in parts] + [_half(part, s, 1) for part in reversed(parts)]
    return torch.cat(halves, dim=s)


def _of_rank(x: torch.Tensor, s: int, size: int, rank: int, causal: bool) -> torch.Tensor:
    """Return a rank's part of tokens that are in the sequence's order."""
    if not causal:
        return x.chunk(size, dim=s)[rank]
    chunks = x.chunk(2 * size, dim=s)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=s)


class AttnFuncWithCPAndKVAllGather(torch.autograd.Function):
    """Gathers all keys and values on every rank.

    Saves q, this rank's k and v, and for each chunk the output, sums and seeds; backward gathers again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        is_training: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        args: CoreArgs,
        cp: ContextParallel,
    ) -> torch.Tensor:
        calls.forward("AttnFuncWithCPAndKVAllGather")
        s = args.qkv_format.index("s")
        parts = []
        keys, values = (_gather(x, s, args.causal, cp) for x in (k, v))
        for rows, count, its_args in _chunks(args, q, cp):
            parts.append((rows, *_forward(its_args, rows, *(_first(x, s, count) for x in (keys, values)))))
        out = torch.cat([out for _, out, _, _ in parts], dim=s)
        tensors = [tensor for _, *tensors in parts for tensor in tensors]
        ctx.save_for_backward(q, k, v, *tensors)
        ctx.args, ctx.cp = args, cp
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        args, cp = ctx.args, ctx.cp
        s = args.qkv_format.index("s")
        q, k, v, *saved = ctx.saved_tensors
        keys, values = (_gather(x, s, args.causal, cp) for x in (k, v))
        totals = [torch.zeros_like(x, dtype=torch.float32) for x in (keys, values)]
        dqs, begin = [], 0
        for i, (rows, count, its_args) in enumerate(_chunks(args, q, cp)):
            grad = dout.narrow(s, begin, rows.shape[s]).contiguous()
            begin += rows.shape[s]
            seen = (_first(x, s, count) for x in (keys, values))
            dq, *others = _backward(its_args, grad, rows, *seen, *saved[3 * i : 3 * i + 3])
            dqs.append(dq)
            for total, other in zip(totals, others, strict=True):
                total.narrow(s, 0, count).add_(other.float())
        for total in totals:
            dist.all_reduce(total, group=cp.group)
        dk, dv = (_of_rank(x, s, cp.size, cp.rank, args.causal).to(k.dtype) for x in totals)
        return None, torch.cat(dqs, dim=s), dk, dv, None, None


def _first(x: torch.Tensor, s: int, count: int) -> torch.Tensor:
    return x.narrow(s, 0, count).contiguous()


def _gather(x: torch.Tensor, s: int, causal: bool, cp: ContextParallel) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(cp.size)]
    dist.all_gather(parts, x.contiguous(), group=cp.group)
    return _in_order(parts, s, causal)


def _chunks(args: CoreArgs, q: torch.Tensor, cp: ContextParallel) -> list[tuple[torch.Tensor, int, CoreArgs]]:
    """Return for each chunk: its rows of q, how many of the sequence's first tokens they see, and the arguments.

    The arguments align a causal mask to the last of these tokens.
    """
    s = args.qkv_format.index("s")
    if not args.causal:
        return [(q.contiguous(), q.shape[s] * cp.size, args)]
    length = q.shape[s] // 2
    places = cp.rank, 2 * cp.size - 1 - cp.rank
    bottom = replace(args, bottom_right=True)
    return [(_half(q, s, i).contiguous(), (place + 1) * length, bottom) for i, place in enumerate(places)]


class AttnFuncWithCPAndQKVOA2A(torch.autograd.Function):
    """Exchanges tokens for heads, attends with some heads on each rank, and exchanges heads for tokens.

    Saves q, k, v and the output of all tokens for this rank's heads, sums and seeds.
    """

    @staticmethod
    def forward(
        ctx: Any,
        is_training: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        args: CoreArgs,
        cp: ContextParallel,
    ) -> torch.Tensor:
        calls.forward("AttnFuncWithCPAndQKVOA2A")
        s = args.qkv_format.index("s")
        q, k, v = (_to_heads(x, s, args.causal, cp) for x in (q, k, v))
        out, lse, seeds = _forward(args, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, seeds)
        ctx.args, ctx.cp = args, cp
        return _to_tokens(out, s, args.causal, cp)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        args, cp = ctx.args, ctx.cp
        s = args.qkv_format.index("s")
        grads = _backward(args, _to_heads(dout, s, args.causal, cp), *ctx.saved_tensors)
        return None, *(_to_tokens(grad, s, args.causal, cp) for grad in grads), None, None


def _to_heads(x: torch.Tensor, s: int, causal: bool, cp: ContextParallel) -> torch.Tensor:
    assert x.shape[-2] % cp.size == 0, "heads are not divisible by the context-parallel ranks"
    return _in_order(_exchange(x.chunk(cp.size, dim=-2), cp), s, causal).contiguous()


def _to_tokens(x: torch.Tensor, s: int, causal: bool, cp: ContextParallel) -> torch.Tensor:
    parts = [_of_rank(x, s, cp.size, rank, causal) for rank in range(cp.size)]
    return torch.cat(_exchange(parts, cp), dim=-2)


def _exchange(parts: Any, cp: ContextParallel) -> list[torch.Tensor]:
    """Send one part to each rank, and return the parts that the ranks sent to this one."""
    sent = torch.stack([part.contiguous() for part in parts])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=cp.group)
    return list(received)
