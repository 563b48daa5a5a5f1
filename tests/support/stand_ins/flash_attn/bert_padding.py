"""Packs and unpacks tokens of padded sequences, by torch's operators, as the real module does."""

from __future__ import annotations

from typing import Any

import torch


class IndexFirstAxis(torch.autograd.Function):
    """Takes rows, and saves their indices."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = input.shape[0]
        return torch.gather(input.flatten(1), 0, indices[:, None].expand(-1, input[0].numel())).reshape(
            -1, *input.shape[1:]
        )

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        grad = grad_output.new_zeros((ctx.rows, grad_output[0].numel()))
        grad.scatter_(0, indices[:, None].expand(-1, grad.shape[1]), grad_output.flatten(1))
        return grad.reshape(ctx.rows, *grad_output.shape[1:]), None


class IndexPutFirstAxis(torch.autograd.Function):
    """Puts rows back to their places."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
        ctx.save_for_backward(indices)
        output = torch.zeros(first_axis_dim, *values.shape[1:], device=values.device, dtype=values.dtype)
        output[indices] = values
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad_output[ctx.saved_tensors[0]], None, None


index_first_axis = IndexFirstAxis.apply
index_put_first_axis = IndexPutFirstAxis.apply


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Pack the tokens of [b, s, ...] by a mask [b, s].

    Returns:
        The tokens, their indices in [b * s], the starts of the sequences, the longest length, and all lengths.
    """
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, starts, int(lengths.max()), used


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Unpack tokens [t, ...] to [b, s, ...], with zeros where there is no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).reshape(batch, seqlen, *hidden_states.shape[1:])
