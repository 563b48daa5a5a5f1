"""Lists the frameworks that memplug supports, in the order in which `attach` tries them."""

from __future__ import annotations

from torch import nn

from memplug.hooks.deepspeed import DeepSpeed
from memplug.hooks.framework import AttachTarget, Framework
from memplug.hooks.megatron import Megatron
from memplug.hooks.transformers import Transformers

FRAMEWORKS: tuple[Framework, ...] = (DeepSpeed(), Megatron(), Transformers())


def frameworks_in(target: AttachTarget) -> list[Framework]:
    """Return the frameworks that drive the target or define its modules."""
    return [framework for framework in FRAMEWORKS if framework.is_in(target)]


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module contains experts of a mixture, according to any framework."""
    return any(framework.is_expert(module) for framework in FRAMEWORKS)
