"""Digests of gradients."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def digest(model: nn.Module) -> str:
    """Return a digest of all gradients."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    parts = [gradient.flatten().view(torch.uint8).cpu().numpy().tobytes() for gradient in found]
    return hashlib.sha256(b"".join(parts)).hexdigest()
