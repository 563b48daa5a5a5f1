"""Moves rows to their experts and back, by a map of tokens to experts, and in chunks."""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine_torch as tex
from stand_in_kernels import calls, native

from transformer_engine.pytorch.utils import refuse


class _moe_permute_mask_map(torch.autograd.Function):
    """Saves only the map."""

    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        calls.forward("_moe_permute_mask_map")
        row_id_map = native.row_map(routing_map.contiguous())
        tokens, pairs = native.invert_row_map(row_id_map, num_out_tokens)
        output = tex.gather_rows(inp, tokens)
        moved = None if probs is None else tex.gather_rows(probs.reshape(-1, 1), pairs).view(-1)
        ctx.save_for_backward(row_id_map)
        ctx.with_probs = probs is not None
        ctx.mark_non_differentiable(row_id_map)
        return output, row_id_map, moved

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any, probs_grad: torch.Tensor | None) -> tuple[Any, ...]:
        (row_id_map,) = ctx.saved_tensors
        grad_probs = None
        if ctx.with_probs and probs_grad is not None:
            grad_probs = tex.gather_rows(probs_grad.reshape(-1, 1), row_id_map.view(-1)).view(row_id_map.shape)
        return tex.gather_rows(grad, row_id_map), None, None, grad_probs


class _moe_unpermute_mask_map(torch.autograd.Function):
    """Saves only the map: tokens' rows are summed without weights."""

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, row_id_map: torch.Tensor) -> torch.Tensor:
        calls.forward("_moe_unpermute_mask_map")
        ctx.save_for_backward(row_id_map)
        ctx.count = inp.shape[0]
        return tex.gather_rows(inp, row_id_map)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, _ = native.invert_row_map(ctx.saved_tensors[0], ctx.count)
        return tex.gather_rows(grad, tokens), None


class _moe_chunk_sort(torch.autograd.Function):
    """Saves the reverse map."""

    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, split_sizes: torch.Tensor, sorted_idxs: torch.Tensor, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        calls.forward("_moe_chunk_sort")
        sizes, order = (x.to(inp.device, torch.int64).reshape(-1) for x in (split_sizes, sorted_idxs))
        sources, reverse = native.chunk_map(sizes, order, inp.shape[0])
        ctx.save_for_backward(reverse)
        moved = None if probs is None else tex.gather_rows(probs.reshape(-1, 1), sources).view(probs.shape)
        return tex.gather_rows(inp, sources), moved

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, probs_grad: torch.Tensor | None) -> tuple[Any, ...]:
        (reverse,) = ctx.saved_tensors
        if probs_grad is not None:
            probs_grad = tex.gather_rows(probs_grad.reshape(-1, 1), reverse).view(probs_grad.shape)
        return tex.gather_rows(grad, reverse), None, None, probs_grad


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows by expert, and the map for `moe_unpermute`."""
    refuse(map_type=map_type != "mask" and map_type)
    output, row_id_map, _ = _moe_permute_mask_map.apply(inp, routing_map, num_out_tokens, None)
    return output, row_id_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows by expert, their probabilities, and the map."""
    output, row_id_map, moved = _moe_permute_mask_map.apply(inp, routing_map, num_out_tokens, probs)
    return output, moved, row_id_map


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Any = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of each token's rows."""
    refuse(merging_probs=merging_probs is not None, probs=probs is not None, map_type=map_type != "mask" and map_type)
    return _moe_unpermute_mask_map.apply(inp, row_id_map)


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """Return the chunks of rows in another order."""
    return _moe_chunk_sort.apply(inp, split_sizes, sorted_index, None)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chunks of rows, and their probabilities, in another order."""
    return _moe_chunk_sort.apply(inp, split_sizes, sorted_index, probs)
