"""The modes of training that an estimate compares; makes a model train in one of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memplug.config import MemplugConfig
from memplug.tokenwise.engine import operators

MODES = ("keep", "full", "selective", "memplug")
"""Respectively: keep all activations; recompute each layer; recompute each layer except attention; memplug plans."""


def block_of(mode: str, config: MemplugConfig, plan_dir: Path | None) -> MemplugConfig:
    """Return the block that a mode trains with.

    In modes other than "memplug" the block leaves only the arena on.

    Args:
        mode: The mode's name.
        config: The user's block.
        plan_dir: The folder for memplug's plan; None: the plan is not written.
    """
    profiler = config.profiler.model_copy(update={"wait_for_plans": True})
    changes: dict[str, Any] = {"enabled": True, "plan_dir": False, "profiler": profiler}
    if mode == "memplug":
        changes["plan_dir"] = str(plan_dir) if plan_dir is not None else False
    else:
        config = config.with_only("arena")
    return config.model_copy(update=changes)


def recompute(layers: Iterable[nn.Module], mode: str) -> None:
    """Make layers recompute in backward, by `torch.utils.checkpoint`, in modes "full" and "selective"."""
    if mode not in ("full", "selective"):
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _attention_is_saved)
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


def _attention_is_saved(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_attention = operators.kind_of(operator) is operators.CaptureKind.ATTENTION
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE
