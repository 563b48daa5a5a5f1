"""Pads the rows of each expert to a multiple that products in FP8 need."""

from __future__ import annotations

from typing import Any

import torch


class Fp8Padding(torch.nn.Module):
    """Adds rows of zeros to each expert's rows, by torch's operators (the real module has a kernel)."""

    def __init__(self, num_gemms: int, align_size: int | None = None):
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Return the padded rows, and how many of them each expert has."""
        padded = [-(-rows // self.align_size) * self.align_size for rows in m_splits]
        if padded == m_splits:
            return inp, m_splits
        parts = zip(inp.split(m_splits), m_splits, padded, strict=True)
        pad = torch.nn.functional.pad
        return torch.cat([pad(part, (0, 0, 0, after - before)) for part, before, after in parts]), padded


class Fp8Unpadding(torch.nn.Module):
    """Removes the added rows."""

    def __init__(self, num_gemms: int, align_size: int | None = None):
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> Any:
        """Remove the added rows; `m_splits` are the counts before padding."""
        padded = [-(-rows // self.align_size) * self.align_size for rows in m_splits]
        if padded == m_splits:
            return inp
        parts = zip(inp.split(padded), m_splits, strict=True)
        return torch.cat([part[:rows] for part, rows in parts])
