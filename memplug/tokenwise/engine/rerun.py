"""A recompute pass that runs the region's module again, because no tape shows all that its forward did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memplug.errors import RecomputeError
from memplug.tokenwise.engine.ambient import no_transforms, restored
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.engine.runs import RegionRunner
from memplug.tokenwise.engine.state import CallState
from memplug.tokenwise.engine.tape import named


def rerun(executor: RegionRunner, frame: Any, region: Region) -> None:
    """Run the region's module again, and store the tensors that it saves.

    The whole module runs, including its collectives, whatever was captured. So a module that launches collectives runs
    again only if there is a single rank (native/tape/frame.h).

    Args:
        executor: the executor of the region.
        frame: the frame of the forward (native/tape/running.h).
        region: the region.

    Raises:
        RecomputeError: the pass saves another number of tensors than the forward, or tensors of other sizes or dtypes.
            Or the forward was opaque although earlier ones were not, and the region communicates with other ranks or
            changes attributes: memplug had not prepared to run such a forward again.
    """
    if frame.talks and not executor.is_alone():
        raise RecomputeError(
            f"region {region.name} communicates, and a forward was opaque ({named(frame.opaque)}) although earlier "
            "ones were not: to run it again on this rank alone would leave the others waiting",
            'Leave the module out of "tokenwise.regions".',
            code="MP022",
        )
    saves = _Saves(frame, region)
    hooks = torch.autograd.graph.saved_tensors_hooks(saves.pack, held_meanwhile)
    ambient = restored(executor.device, frame.surroundings, *frame.ambient)
    states = executor.rerunning(frame.unit_states)
    leaves = frame.leaves if region.native.asks else []
    try:
        with no_transforms(), states, as_before(frame.buffers), _gradients_as_before(leaves), ambient:
            with torch.enable_grad(), hooks:
                args, kwargs = frame.arguments()
                with _names_as_before(frame, region, args, kwargs):
                    frame.call(*args, **kwargs)
    finally:
        saves.frame = None
    if saves.count != frame.saved:
        raise RecomputeError(
            f"region {region.name}: forward saved {frame.saved} tensors for backward, the recompute pass {saves.count}",
            code="MP021",
        )
    frame.consume_inputs()


class _Saves:
    """Gives a frame the tensors that a recompute pass saves.

    The pass's own graph holds this object, and may live as long as a tensor that the module wrote to. So this object
    drops the frame when the pass ends.

    Attributes:
        frame: the frame; None once the pass is over.
        count: number of tensors that the pass has saved.
    """

    def __init__(self, frame: Any, region: Region):
        self.frame, self.count = frame, 0
        self._region, self._asks = region, region.native.asks

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Give a tensor that the pass saves to the frame.

        Returns:
            The object for the pass's own graph to save: the tensor if the module itself runs backward through that
                graph, else None.
        """
        frame, count = self.frame, self.count
        if count < frame.saved and frame.has_to_restore(count):
            size, dtype = frame.saved_as(count)
            if (size, dtype) != (tuple(tensor.shape), tensor.dtype):
                raise RecomputeError(
                    f"region {self._region.name}: a saved tensor was {size} {dtype} in forward and is "
                    f"{tuple(tensor.shape)} {tensor.dtype} when recomputed",
                    code="MP021",
                )
            frame.restore(count, tensor.detach())
        self.count += 1
        return tensor.detach() if self._asks else None


@contextlib.contextmanager
def _names_as_before(frame: Any, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Enter a context in which every name has the value that the forward found.

    If the forward was opaque although earlier ones were not, these values are unknown. Then the module must not change
    any name.

    Raises:
        RecomputeError: the values are unknown, and the module changed a name.
    """
    if frame.state is not None:
        with frame.state.as_before():
            yield
        return
    now = CallState.of(frame.call, args, kwargs, for_backward=False)
    changed = bool(now.unknown)
    try:
        yield
    finally:
        changed |= now.put_back()
    if changed:
        raise RecomputeError(
            f"region {region.name} changes attributes in its forward, and a forward was opaque ({named(frame.opaque)}) "
            "although the forwards before it were not: it cannot be run again as it ran",
            'Leave the module out of "tokenwise.regions".',
            code="MP022",
        )


def as_before(buffers: Any) -> Any:
    """Return a context in which every buffer has the value from before the forward.

    Args:
        buffers: the frame's `Buffers`; None: the forward wrote to none.
    """
    return contextlib.nullcontext() if buffers is None else buffers.as_before()


@contextlib.contextmanager
def _gradients_as_before(leaves: Sequence[tuple[torch.Tensor, bool]]) -> Iterator[None]:
    """Enter a context in which leaves that had no gradient in the forward have none.

    This is for modules that accumulate gradients themselves.

    Args:
        leaves: (leaf, whether it had a gradient in the forward).
    """
    now = [(leaf, leaf.grad) for leaf, had_gradient in leaves if not had_gradient]
    for leaf, _ in now:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in now:
            leaf.grad = gradient


def held_meanwhile(packed: torch.Tensor | None) -> torch.Tensor:
    """Unpack a tensor that a recompute pass saved; called only if the module asks for a gradient itself."""
    assert packed is not None, "a region that never asked for a gradient does so when it runs again"
    return packed
