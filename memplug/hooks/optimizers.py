"""Detects a training loop that steps its optimizer without calling `session.step()`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from memplug.session.attached import AttachedModel

UNMARKED_STEPS = 3  # after so many steps of one optimizer, the loop seems to lack `session.step()`


def watch(chunks: Sequence[nn.Module], attached: AttachedModel) -> None:
    """Make the session warn once if an optimizer of its model steps, but the loop does not call `session.step()`.

    torch calls the hook for every optimizer of the process. The hook keeps neither model nor session alive, and is
    removed with the session.
    """
    parts = [weakref.ref(chunk) for chunk in chunks]
    reference = weakref.ref(attached)
    steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        attached = reference()
        if attached is None or attached.steps or not attached.forwards or not _holds_parameters(optimizer, parts):
            return
        steps[optimizer] = steps.get(optimizer, 0) + 1
        if steps[optimizer] >= UNMARKED_STEPS:
            attached.miss_steps(f"the optimizer has stepped {steps[optimizer]} times")

    handle = optimizers.register_optimizer_step_post_hook(stepped)
    attached.at_detach(handle.remove)
    weakref.finalize(attached, handle.remove)


def _holds_parameters(optimizer: torch.optim.Optimizer, parts: Sequence[weakref.ref[nn.Module]]) -> bool:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    modules = (module for part in parts if (module := part()) is not None)
    return any(id(parameter) in held for module in modules for parameter in module.parameters())
