"""A recompute pass that runs the region's module again, where no tape tells what its forward did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memplug.errors import RecomputeError

if TYPE_CHECKING:
    from memplug.execute.ambient import Ambient
    from memplug.execute.region import Region
    from memplug.execute.saved import Buffers
    from memplug.execute.tokenwise import Executor


def rerun(
    executor: Executor,
    region: Region,
    call: Callable[[], Any],
    ambient: Ambient,
    buffers: Buffers | None,
    saves: int,
    is_wanted: Callable[[int], bool],
    store: Callable[[int, torch.Tensor], None],
) -> None:
    """Run the region's module again, and store what it saves. All of it runs, whatever was captured.

    Args:
        call: runs it, on inputs of a graph of its own.
        ambient: the state around the forward.
        buffers: what the forward wrote to in place, if anything.
        saves: how many tensors the forward saved.
        is_wanted: whether one of them has to be restored.
        store: takes one of them, without its graph.

    Raises:
        RecomputeError: it saves another number of tensors.
    """
    count = 0

    def pack(tensor: torch.Tensor) -> None:
        nonlocal count
        if count < saves and is_wanted(count):
            store(count, tensor.detach())
        count += 1

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, _never)
    executor.recomputing += 1
    try:
        with as_before(buffers), ambient.during_recompute(), torch.enable_grad(), hooks:
            call()
    finally:
        executor.recomputing -= 1
    if count != saves:
        raise RecomputeError(
            f"region {region.name}: forward saved {saves} tensors for backward, the recompute pass {count}"
        )


def as_before(buffers: Buffers | None) -> Any:
    """A context in which every buffer has the value that the forward found."""
    return contextlib.nullcontext() if buffers is None else buffers.as_before()


def _never(packed: Any) -> torch.Tensor:
    raise AssertionError("the recompute pass's own graph is never run")
