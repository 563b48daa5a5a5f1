"""A recompute pass that runs the region's module again, where no tape tells what its forward did."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from memplug.errors import RecomputeError
from memplug.tokenwise.regions.ambient import restored

if TYPE_CHECKING:
    from memplug.tokenwise.regions.executor import Executor
    from memplug.tokenwise.regions.region import Region


def rerun(executor: Executor, frame: Any, region: Region) -> None:
    """Run the region's module again, and store what it saves. All of it runs, whatever was captured.

    Args:
        frame: of the forward (memplug/native/running.h).

    Raises:
        RecomputeError: it saves another number of tensors, or tensors of other sizes or dtypes.
    """
    count = 0

    def pack(tensor: torch.Tensor) -> None:
        nonlocal count
        if count < frame.saved and frame.has_to_restore(count):
            size, dtype = frame.saved_as(count)
            if (size, dtype) != (tuple(tensor.shape), tensor.dtype):
                raise RecomputeError(
                    f"region {region.name}: a saved tensor was {size} {dtype} in forward and is {tuple(tensor.shape)} "
                    f"{tensor.dtype} when recomputed"
                )
            frame.restore(count, tensor.detach())
        count += 1

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, _never)
    ambient = restored(executor.device, frame.surroundings, *frame.ambient)
    with executor.rerunning(frame.unit_states), as_before(frame.buffers), ambient, torch.enable_grad(), hooks:
        args, kwargs = frame.arguments()
        frame.call(*args, **kwargs)
    if count != frame.saved:
        raise RecomputeError(
            f"region {region.name}: forward saved {frame.saved} tensors for backward, the recompute pass {count}"
        )
    frame.consume_inputs()


def as_before(buffers: Any) -> Any:
    """A context in which every buffer has the value that the forward found; None: it wrote to none."""
    return contextlib.nullcontext() if buffers is None else buffers.as_before()


def _never(packed: Any) -> torch.Tensor:
    raise AssertionError("the recompute pass's own graph is never run")
