"""A stand-in for DeepEP that runs on the CPU by gloo, for Megatron-Core's own functions (`fused_a2a`).

The stand-in's kernels talk to other ranks, and fill memory of torch's allocator, unseen by torch's dispatcher. They
were written from the calls in `megatron.core.transformer.moe.fused_a2a`, without DeepEP's code.
"""

from __future__ import annotations

import collections
import importlib
import sys
import types
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.hidden import hidden

calls: collections.Counter[str] = collections.Counter()
"""Counts of the kernels that talked to other ranks, by name."""


def install() -> Any:
    """Install the stand-in for the rest of the process, and return Megatron-Core's module `fused_a2a`."""
    package, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
    package.Buffer, package.HybridEPBuffer, package.utils = Buffer, HybridEPBuffer, utils
    utils.EventHandle = utils.EventOverlap = _Event
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    return importlib.reload(importlib.import_module("megatron.core.transformer.moe.fused_a2a"))


class _Event:
    """An event of a stream; nothing is asynchronous here."""

    def __init__(self, *handles: Any) -> None: ...

    def current_stream_wait(self) -> None:
        """Return at once: nothing is under way."""


def _everyone(group: Any, *values: Any) -> list[tuple[np.ndarray, ...]]:
    """Return the values that each rank passed, in rank order."""
    found: list[Any] = [None] * group.size()
    with hidden():
        dist.all_gather_object(found, [None if x is None else x.detach().numpy() for x in values], group=group)
    return found


def _filled(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return memory from the allocator, filled by no operator."""
    values = np.asarray(values)
    made = torch.empty(values.shape, dtype=dtype)
    made.numpy()[...] = values
    return made


class Buffer:
    """Sends a token once to each rank with an expert of the token, and returns the sum of the experts' outputs."""

    num_nvl_bytes = num_rdma_bytes = 1 << 60

    def __init__(self, group: Any, *sizes: int) -> None:
        self.group = group

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        """Return buffer sizes, which have no meaning here."""
        hint = lambda hidden_bytes, ranks: 0  # noqa: E731
        return types.SimpleNamespace(get_nvl_buffer_size_hint=hint, get_rdma_buffer_size_hint=hint)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **options: Any) -> Any:
        """Count tokens by rank and by expert.

        Returns:
            Counts of tokens by rank, None (for counts by node), counts of tokens by expert, bool[tokens, ranks]
                (whether a rank gets a token), and an event.
        """
        chosen, ranks = topk_idx.numpy(), self.group.size()
        here = np.stack([(chosen // (num_experts // ranks) == rank).any(-1) for rank in range(ranks)], -1)
        experts = np.bincount(chosen.flatten(), minlength=num_experts)
        counts = _filled(here.sum(0), torch.int32), None, _filled(experts, torch.int32)
        return *counts, _filled(here, torch.bool), _Event()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Any = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Send tokens to the ranks of their experts.

        Returns:
            The received tokens, their experts numbered from this rank's first expert (-1: another rank's expert),
                their weights, the count of tokens for each of this rank's experts, a handle and an event. If `handle`
                is given, all but the tokens and the event are None.
        """
        calls["dispatch"] += 1
        me = self.group.rank()
        if handle is not None:
            (everywhere,) = handle
            sent = _everyone(self.group, x)
            rows = [tokens[0][everywhere[rank, :, me].numpy()] for rank, tokens in enumerate(sent)]
            return _filled(np.concatenate(rows), x.dtype), None, None, None, None, _Event()
        sent = _everyone(self.group, x, topk_idx, topk_weights, is_token_in_rank)
        taken = [[values[each[3][:, me]] for values in each[:3]] for each in sent]
        rows, chosen, weights = (np.concatenate(part) for part in zip(*taken, strict=True))
        own = len(num_tokens_per_expert) // self.group.size()
        is_own = chosen // own == me
        chosen = np.where(is_own, chosen - me * own, -1)
        everywhere = _filled(np.stack([each[3] for each in sent]), torch.bool)
        counts = np.bincount(chosen[is_own], minlength=own).tolist()
        received = _filled(rows, x.dtype), _filled(chosen, torch.int64), _filled(weights * is_own, torch.float32)
        return *received, counts, (everywhere,), _Event()

    def combine(self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None, **options: Any) -> Any:
        """Return the summed outputs of this rank's tokens, the sums of their weights, and an event."""
        calls["combine"] += 1
        (everywhere,), me = handle, self.group.rank()
        sent = _everyone(self.group, x, topk_weights)
        found: list[Any] = [None, None]
        for rank, parts in enumerate(sent):
            counts = everywhere[:, :, rank].sum(-1).tolist()
            begin, mine = sum(counts[:me]), everywhere[me, :, rank].numpy()
            for i, values in enumerate(parts):
                if values is not None:
                    found[i] = np.zeros((len(mine), values.shape[-1]), "f") if found[i] is None else found[i]
                    found[i][mine] += values[begin : begin + counts[me]]
        sums, weights = (None if each is None else _filled(each, x.dtype) for each in found)
        return sums, weights, _Event()


class HybridEPBuffer:
    """Sends each token to each of its experts; received tokens are ordered by expert, then by source rank."""

    def __init__(self, group: Any, num_local_experts: int, **sizes: Any) -> None:
        self.group, self.own = group, num_local_experts

    def _mine(self, everywhere: torch.Tensor, rank: int) -> list[tuple[int, np.ndarray]]:
        """Return the pieces of a rank's received tokens, in order: (source rank, indices of its tokens)."""
        experts = range(rank * self.own, (rank + 1) * self.own)
        return [
            (source, each[:, expert].nonzero()[0])
            for expert in experts
            for source, each in enumerate(everywhere.numpy())
        ]

    def dispatch_with_permute(
        self,
        hidden: torch.Tensor,
        scaling_factor: Any,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        handle: Any = None,
        **options: Any,
    ) -> Any:
        """Return received tokens, their probabilities, None, the token count of each own expert, and a handle."""
        calls["dispatch"] += 1
        me = self.group.rank()
        sent = _everyone(self.group, hidden, routing_map, probs)
        everywhere = _filled(np.stack([each[1] for each in sent]), torch.bool) if handle is None else handle[0]
        pieces = self._mine(everywhere, me)
        rows = _filled(np.concatenate([sent[source][0][tokens] for source, tokens in pieces]), hidden.dtype)
        if probs is None:
            return rows, None, None, None, (everywhere,)
        experts = np.repeat(np.arange(me * self.own, (me + 1) * self.own), self.group.size())
        chances = [sent[source][2][tokens, expert] for (source, tokens), expert in zip(pieces, experts, strict=True)]
        counts = everywhere.numpy().sum((0, 1))[me * self.own : (me + 1) * self.own]
        return rows, _filled(np.concatenate(chances), probs.dtype), None, _filled(counts, torch.int64), (everywhere,)

    def combine_with_unpermute(
        self, hidden: torch.Tensor, handle: Any, probs: torch.Tensor | None = None, **options: Any
    ) -> Any:
        """Return the summed outputs of this rank's tokens, and their probabilities [tokens, experts]."""
        calls["combine"] += 1
        (everywhere,), me = handle, self.group.rank()
        sent = _everyone(self.group, hidden, probs)
        sums = np.zeros((everywhere.shape[1], hidden.shape[-1]), "f")
        chances = np.zeros(tuple(everywhere.shape[1:]), "f")
        for rank, (rows, weights) in enumerate(sent):
            begin = 0
            for i, (source, tokens) in enumerate(self._mine(everywhere, rank)):
                if source == me:
                    sums[tokens] += rows[begin : begin + len(tokens)]
                    if weights is not None:
                        chances[tokens, rank * self.own + i // self.group.size()] = weights[begin : begin + len(tokens)]
                begin += len(tokens)
        return _filled(sums, hidden.dtype), None if probs is None else _filled(chances, probs.dtype)
