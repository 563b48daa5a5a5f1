"""Tells a session when its model runs forward with gradients, and notices a training loop that never ends a step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from memplug.session import Session

log = logging.getLogger("memplug")

STEPS_UNTOLD = 3  # of an optimizer of the model, after which `session.step()` seems to have been forgotten
FORWARDS_UNTOLD = 100  # likewise, of the model, where no optimizer of torch's was seen


class Forwards:
    """The hooks of one session; undone when it detaches.

    Args:
        chunks: the parts of the model that are called.
    """

    def __init__(self, chunks: Sequence[nn.Module], session: Session):
        self._chunks, self._session = chunks, session
        self._forwards = self._optimizer_steps = 0
        self._warned = False
        # compiled code goes around it, instead of reading the session's state into its guards
        begin = torch.compiler.disable(self._begin_forward)
        for chunk in chunks:
            session.at_detach(chunk.register_forward_pre_hook(begin).remove)
        ended = weakref.WeakMethod(self._end_optimizer_step)  # the hook is torch's own, and keeps no model alive
        handle = optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: (ended() or _ignore)(optimizer))
        session.at_detach(handle.remove)
        weakref.finalize(session, handle.remove)

    def _begin_forward(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._session.begin_forward()
        self._forwards += 1
        if self._forwards == FORWARDS_UNTOLD and not (self._warned or self._session.steps):
            self._warn(f"the model ran forward {FORWARDS_UNTOLD} times")

    def _end_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._warned or self._session.steps:
            return
        if self._forwards and self._holds_parameters(optimizer):
            self._optimizer_steps += 1
            if self._optimizer_steps == STEPS_UNTOLD:
                self._warn(f"the optimizer has stepped {STEPS_UNTOLD} times")

    def _holds_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(id(parameter) in held for chunk in self._chunks for parameter in chunk.parameters())

    def _warn(self, seen: str) -> None:
        self._warned = True
        log.warning(
            "memplug: %s, and no step has ended: nothing is planned. Add `session.step()` after `optimizer.step()`",
            seen,
        )


def _ignore(optimizer: torch.optim.Optimizer) -> None:
    """The session is gone."""
