"""Rotary position embedding, by one kernel or by torch's operators."""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine_torch as tex
from stand_in_kernels import calls

from transformer_engine.pytorch.utils import default_device, refuse


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles of each position, [s, 1, 1, d]."""

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ):
        super().__init__()
        refuse(seq_len_interpolation_factor=seq_len_interpolation_factor)
        refuse(pretrained_max_position_embeddings=pretrained_max_position_embeddings)
        dim = int(dim * rotary_percent)
        places = torch.arange(0, dim, 2, dtype=torch.float32, device=default_device()) / dim
        self.register_buffer("inv_freq", 1.0 / rotary_base**places)
        self.interleaved = interleaved

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Return the angles in radians."""
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype) + offset
        angles = torch.outer(positions, self.inv_freq)
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]


class FusedRoPEFunc(torch.autograd.Function):
    """Rotates; saves the angles and the starts of packed sequences, but not its input."""

    @staticmethod
    def forward(
        ctx: Any,
        t: torch.Tensor,
        freqs: torch.Tensor,
        start_positions: Any = None,
        tensor_format: str = "sbhd",
        interleaved: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
    ) -> torch.Tensor:
        calls.forward("FusedRoPEFunc")
        refuse(start_positions=start_positions is not None, cp_size=cp_size > 1 and tensor_format == "thd")
        freqs = freqs.float().contiguous()
        ctx.save_for_backward(freqs, cu_seqlens)
        ctx.tensor_format, ctx.interleaved = tensor_format, interleaved
        return tex.rope(t, freqs, tensor_format, interleaved, 1, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        freqs, cu_seqlens = ctx.saved_tensors
        grad = tex.rope(grad_output.contiguous(), freqs, ctx.tensor_format, ctx.interleaved, -1, cu_seqlens)
        return grad, *(None,) * 7


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: Any = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate pairs of each head's first elements by their position's angles."""
    if fused:
        return FusedRoPEFunc.apply(t, freqs, start_positions, tensor_format, interleaved, cu_seqlens, cp_size, cp_rank)
    refuse(start_positions=start_positions is not None, tensor_format=tensor_format == "thd" and tensor_format)
    freqs = freqs if tensor_format == "sbhd" else freqs.transpose(0, 1)
    width = freqs.shape[-1]
    turned, rest = t[..., :width], t[..., width:]
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        other = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    turned = turned * freqs.cos().to(t.dtype) + other * freqs.sin().to(t.dtype)
    return torch.cat((turned, rest), dim=-1)
