"""The frameworks that memplug knows, each with its file beside this one. What comes first is asked first."""

from __future__ import annotations

from torch import nn

from memplug.hooks.deepspeed import DeepSpeed
from memplug.hooks.framework import AttachTarget, Framework
from memplug.hooks.megatron import Megatron
from memplug.hooks.transformers import Transformers

FRAMEWORKS: tuple[Framework, ...] = (DeepSpeed(), Megatron(), Transformers())


def frameworks_in(target: AttachTarget) -> list[Framework]:
    """Those that drive the target, or that it is made of."""
    return [framework for framework in FRAMEWORKS if framework.is_in(target)]


def holds_experts(module: nn.Module) -> bool:
    """Whether it holds experts of a mixture, by any framework."""
    return any(framework.is_expert(module) for framework in FRAMEWORKS)
