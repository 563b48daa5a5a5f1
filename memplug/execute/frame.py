"""One forward of one region in one autograd graph, and its recompute pass.

There are two kinds. `memplug.execute.replayed.Replayed` is observed: backward gets captured tensors straight from the
host, and all else from a recompute pass that runs the operators it needs. `memplug.execute.unobserved.Unobserved` does
without the native core: its recompute pass runs the module again.

The frame lives as long as the graph does, so several graphs can be in flight, in any order, and backward can run more
than once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memplug.errors import RecomputeError
from memplug.execute import garbage
from memplug.execute.ambient import Ambient
from memplug.execute.arguments import flatten, tensor_bytes, unflatten
from memplug.execute.saved import Buffers, Held, leaf_of
from memplug.execute.tape import Record, Tape, is_plain, storage_of

if TYPE_CHECKING:
    from memplug.execute.region import Region
    from memplug.execute.tokenwise import Executor


class Frame:
    """See the module's text. Made by `Executor.run`; nothing but the autograd graph keeps it alive.

    Attributes:
        inputs: of the region, flat: tensors that are swapped or held, other values as they are.
        tape: what the planner reads, where the forward was timed.
        records: of the tape that the forward followed, or made; None where none tells of it.
        given_bytes: of all tensors among the inputs.
        saved_bytes: of all storages that backward asks for, and that were not there before the region.
        offered, offered_bytes: how many inputs were to be swapped, whether or not the host had room.
    """

    opaque = False
    communicates = False  # a recompute pass launches collectives
    writes_input = False
    offered = offered_bytes = saved_bytes = 0

    def __init__(self, executor: Executor, region: Region, call: Callable[..., Any], args: Any, kwargs: Any):
        self.executor = executor
        self.region = region
        self.call = call
        self.tape: Tape | None = None
        self.records: list[Record] | None = None
        self.buffers = Buffers()
        self.ambient = Ambient(executor.device, executor.surroundings)
        flat: list[Any] = []
        self.spec = flatten((args, kwargs), flat)
        self.given_bytes = tensor_bytes(flat)
        self.inputs = [self._input(value) if isinstance(value, torch.Tensor) else value for value in flat]

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Run the region's forward once. Shapes and values are those of the region's own forward."""
        raise NotImplementedError

    def _input(self, value: torch.Tensor) -> Any:
        """A region input: swapped whole where gradients flow through it, else held."""
        swaps = self.region.swaps_input and value.requires_grad and not value.is_leaf
        return self._enter(value, swaps) or Held(value)

    def _enter(self, value: torch.Tensor, swaps: bool) -> Any:
        """An input's copy, if it `swaps` and there is room."""
        raise NotImplementedError

    def _acquire(self, part: Any) -> torch.Tensor:
        """A swapped input, on the device."""
        raise NotImplementedError

    def _consume(self, part: Any) -> None:
        """The recompute pass has read it."""

    def note_foreign_write(self, tensor: torch.Tensor) -> list[Held]:
        """Memory that was there before the region is about to be written to, for the first time: a recompute pass must
        find its value of now, and leave no trace. Returns the inputs in that memory that are held, copies by now.
        """
        held = [item for item in self.inputs if isinstance(item, Held) and _share_memory(item.tensor, tensor)]
        for item in held:
            item.before_write()
        if not held:
            self.buffers.note(tensor)
        return held

    def rerun(self, saves: int, is_wanted: Callable[[int], bool], store: Callable[[int, torch.Tensor], None]) -> None:
        """Run the region's module again, and store what it saves. All of it runs, whatever was captured.

        Args:
            saves: how many tensors the forward saved.
            is_wanted: whether one of them has to be restored.
            store: takes one of them, without its graph.

        Raises:
            RecomputeError: it saves another number of tensors.
        """
        executor = self.executor
        args, kwargs = unflatten(self.spec, iter([self._value(item) for item in self.inputs]))
        count = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            if count < saves and is_wanted(count):
                store(count, tensor.detach())
            count += 1

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _never)
        executor.recomputing += 1
        try:
            with (
                self.buffers.as_before(),
                self.ambient.during_recompute(),
                torch.enable_grad(),
                garbage.outside(),
                hooks,
            ):
                self.call(*args, **kwargs)
        finally:
            executor.recomputing -= 1
        del args, kwargs
        for item in self.inputs:
            if isinstance(item, executor.swapped_type):
                self._consume(item)
        if count != saves:
            raise RecomputeError(
                f"region {self.region.name}: forward saved {saves} tensors for backward, the recompute pass {count}"
            )

    def _value(self, item: Any) -> Any:
        if isinstance(item, self.executor.swapped_type):
            return leaf_of(self._acquire(item), True, self.writes_input)
        return leaf_of(item.get(), item.requires_grad, item.written) if isinstance(item, Held) else item


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return is_plain(type(one)) and storage_of(one) == storage_of(other)


def _never(packed: Any) -> torch.Tensor:
    raise AssertionError("the recompute pass's own graph is never run")
