"""Lets a run resume from a kept plan at the first forward, so that the arena serves the first step already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memplug.hooks.places import shapes
from memplug.hooks.tracing import nothing, outside
from memplug.session.attached import AttachedModel


def watch(chunks: Sequence[nn.Module], attached: AttachedModel) -> None:
    """Call `begin_run` of the session before the first forward with gradients of any chunk."""
    removals: list[Callable[[], None]] = []

    def begin(chunk: nn.Module, args: Any, kwargs: Any) -> None:
        if not (removals and torch.is_grad_enabled()):  # compiled code still calls removed hooks
            return
        while removals:
            removals.pop()()
        attached.begin_run(shapes((*args, *kwargs.values())), chunk, args, kwargs)

    for chunk in chunks:
        handle = chunk.register_forward_pre_hook(outside(begin, nothing), with_kwargs=True)
        removals.append(handle.remove)
        attached.at_detach(handle.remove)
