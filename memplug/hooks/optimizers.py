"""Notices a training loop that steps its optimizer and never tells the session."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from memplug.session import Session

STEPS_UNTOLD = 3  # of an optimizer of the model, after which `session.step()` seems to have been forgotten


def watch(chunks: Sequence[nn.Module], session: Session) -> None:
    """Have the session warn once where an optimizer of these parts of its model steps and `session.step()` is never
    called.

    The hook is torch's own, for all optimizers: it keeps neither model nor session alive, and goes with the session.
    """
    parts = [weakref.ref(chunk) for chunk in chunks]
    attached = weakref.ref(session)
    steps = 0

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal steps
        told = attached()
        if told is None or told.steps or not told.forwards or not _holds_parameters(optimizer, parts):
            return
        steps += 1
        if steps >= STEPS_UNTOLD:
            told.miss_steps(f"the optimizer has stepped {steps} times")

    handle = optimizers.register_optimizer_step_post_hook(stepped)
    session.at_detach(handle.remove)
    weakref.finalize(session, handle.remove)


def _holds_parameters(optimizer: torch.optim.Optimizer, parts: Sequence[weakref.ref[nn.Module]]) -> bool:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    modules = (module for part in parts if (module := part()) is not None)
    return any(id(parameter) in held for module in modules for parameter in module.parameters())
