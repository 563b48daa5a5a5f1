"""Reports the inputs of each step's first forward, by which a session recognises the step's program.

A run that resumes from a kept plan begins there too, so that the arena serves the first step already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memplug.hooks.places import shapes
from memplug.hooks.tracing import nothing, outside
from memplug.session.attached import AttachedModel
from memplug.torch_private import current_graph_task_id


class _Beginning:
    """A hook that reports forwards with gradients; in copies and pickles of the module, a hook that does nothing.

    Args:
        attached: the session.
    """

    def __init__(self, attached: AttachedModel):
        self._attached = attached

    def _report(self, chunk: nn.Module, args: Any, kwargs: Any) -> None:
        attached = self._attached
        if attached.wants_inputs and torch.is_grad_enabled() and current_graph_task_id() == -1:
            attached.begin_inputs(shapes((*args, *kwargs.values())), chunk, args, kwargs)

    __call__ = outside(_report, nothing)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _in_a_copy, ()


def _in_a_copy() -> Callable[..., None]:
    return nothing


def watch(chunks: Sequence[nn.Module], attached: AttachedModel) -> None:
    """Call `begin_inputs` of the session before the first forward with gradients of any chunk in each step."""
    for chunk in chunks:
        handle = chunk.register_forward_pre_hook(_Beginning(attached), with_kwargs=True)
        attached.at_detach(handle.remove)
