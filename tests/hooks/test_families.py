"""Families of transformers train as without memplug, called as they are by default."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import memplug
from tests.support import families

SOME = 12


def trained(family: families.Family, block: dict[str, Any] | None) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Returns losses and gradients of all steps."""
    model = family.make()
    with contextlib.nullcontext() if block is None else memplug.attach(model, block) as session:
        return list(families.steps(model, session))


def block(alpha: float | str) -> dict[str, Any]:
    """Returns one that swaps the smallest tensors."""
    tokenwise = {"alpha": alpha, "min_offload_bytes": 1}
    return {"enabled": True, "plan_dir": False, "arena": {"enabled": False}, "tokenwise": tokenwise}
