"""One forward of one region in one autograd graph: its inputs, what of it is on the host, how much on the device.

There are two kinds. `memplug.execute.replayed.Replayed` is observed: backward gets captured tensors straight from the
host, and all else from a recompute pass that runs the operators it needs. `memplug.execute.unobserved.Unobserved` does
without the native core: its recompute pass runs the module again.

The frame lives as long as the graph does, so several graphs can be in flight, in any order, and backward can run more
than once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from memplug.errors import RecomputeError
from memplug.execute import garbage
from memplug.execute.ambient import Ambient
from memplug.execute.buffers import Buffers
from memplug.execute.saved import Held, leaf_of
from memplug.execute.tape import Record, Tape, is_plain, storage_of
from memplug.execute.transfer import Swapped

if TYPE_CHECKING:
    from memplug.execute.region import Region
    from memplug.execute.tokenwise import Executor


class Frame:
    """See the module's text. Made by `Executor.run`; nothing but the autograd graph keeps it alive.

    Attributes:
        swapped: tensors with a copy on the host, in the order of their copies out; region inputs too.
        todo: of them, what is away and needed in backward, the soonest last.
        tape: what the planner reads, where the forward was timed.
        records: of the tape that the forward followed, or made; None where none tells of it.
    """

    opaque = False
    communicates = False  # a recompute pass launches collectives

    def __init__(self, executor: Executor, region: Region, call: Callable[..., Any], args: Any, kwargs: Any):
        self.executor = executor
        self.region = region
        self.call = call
        self.direct = executor.direct(region)
        self.timed = executor.timing
        self.tape: Tape | None = None
        self.records: list[Record] | None = None
        self.swapped: list[Swapped] = []
        self.todo: list[Swapped] = []
        self.buffers = Buffers()
        self.saved_bytes = 0  # of all storages that backward asks for
        self.pending_bytes = 0  # of those that a recompute pass, still to come, will make
        self.largest_saved_bytes = 0
        self.writes_input = False
        self.input_bytes = 0  # of region inputs that have a copy, but for another region's
        self.offered, self.offered_bytes = 0, 0  # likewise, with those that the host had no room for
        self.recomputes = False  # some saved tensor has to be recomputed
        self.is_over = False  # its forward
        self.previous: weakref.ref[Frame] | None = executor.newest
        executor.in_flight.born(self)
        self.ambient = Ambient(executor.device, executor.surroundings)
        flat, self.spec = tree_flatten((args, kwargs))
        self.inputs = [self._input(value) for value in flat]

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Run the region's forward once. Shapes and values are those of the region's own forward."""
        raise NotImplementedError

    def entered(self, value: torch.Tensor, part: Swapped | None) -> None:
        """A tensor among the inputs, and its copy; None: it is held."""

    def _input(self, value: Any) -> Any:
        """A region input: swapped whole where gradients flow through it, else held."""
        if not isinstance(value, torch.Tensor):
            return value
        swaps = self.region.swaps_input and value.requires_grad and not value.is_leaf
        swaps = swaps and self.executor.worth_swapping(value)
        part = self.executor.swap_input(value, self.region.lingers) if swaps else None
        if part is not None:
            if not part.uses:
                self.input_bytes += part.nbytes
            self.swapped.append(part)
        if swaps and (part is None or not part.uses):
            self.offered += 1
            self.offered_bytes += value.untyped_storage().nbytes()
        self.entered(value, part)
        return part if part is not None else Held(value)

    def _finish(self) -> None:
        """The forward is over, and `uses` of all that is swapped are counted."""
        self.swapped = [part for part in self.swapped if part.uses]
        for part in self.swapped:
            part.uses_left = part.uses
        self.is_over = True
        self.executor.note(self)
        self.executor.trim(self)

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

    # -- between -----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Two regions later: wait for this frame's copies out, and let the device memory go."""
        self.region.released = True
        if self.region.lingers:
            self.executor.expect(self.region)
        self.executor.transfer.release(self.swapped)
        away = [part for part in self.swapped if part.tensor is None]
        self.executor.ledger.waiting += len(away) - len(self.todo)
        self.todo = away[::-1] if self.recomputes else away

    # -- backward ----------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Backward asks for a saved tensor: fetch what it needs next."""
        if self.tape is not None and self.tape.backward_begin is None:
            self.tape.backward_begin = self.executor.device.stamp()
        self.executor.pump(self)

    def consume(self, part: Swapped) -> None:
        """One read of the part is done; after the last in this backward pass, its device memory goes."""
        part.uses_left -= 1
        if part.uses_left <= 0:
            part.uses_left = part.uses
            self.executor.transfer.drop(part)

    def restore(self) -> None:
        """Run the recompute pass: backward asks for a saved tensor that has to be recomputed, and that is not there. It
        gives all of them, and the first that a further backward asks for does so again.
        """
        with self.executor.guard("recompute", self.region):
            begin = self.executor.device.stamp() if self.timed else None
            self.recompute()
            self.pending_bytes = 0
            if self.tape is not None:
                self.tape.recompute_span = (begin, self.executor.device.stamp())

    def recompute(self) -> None:
        """Make all saved tensors that have to be: `store` them."""
        raise NotImplementedError

    def rerun(self, saves: int, is_alive: Callable[[int], bool]) -> None:
        """Run the region's module again, and store what it saves. All of it runs, whatever was captured.

        Args:
            saves: how many tensors the forward saved.
            is_alive: whether backward may still ask for one of them.

        Raises:
            RecomputeError: it saves another number of tensors.
        """
        executor = self.executor
        executor.pump(self)
        values = [self._value(item) for item in self.inputs]
        args, kwargs = tree_unflatten(values, self.spec)
        count = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            if count < saves and is_alive(count):
                self.store(count, tensor.detach())
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
        del args, kwargs, values
        for item in self.inputs:
            if isinstance(item, Swapped):
                self.consume(item)
        if count != saves:
            raise RecomputeError(
                f"region {self.region.name}: forward saved {saves} tensors for backward, the recompute pass {count}"
            )

    def store(self, index: int, tensor: torch.Tensor) -> None:
        """A saved tensor is there again, by its place among all."""
        raise NotImplementedError

    def _value(self, item: Any) -> Any:
        if isinstance(item, Swapped):
            tensor, _ = self.executor.transfer.acquire(item)
            return leaf_of(tensor, True, self.writes_input)
        return leaf_of(item.get(), item.requires_grad, item.written) if isinstance(item, Held) else item

    def __del__(self) -> None:
        self.executor.in_flight.died(self, 0)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return is_plain(type(one)) and storage_of(one) == storage_of(other)


def _never(packed: Any) -> torch.Tensor:
    raise AssertionError("the recompute pass's own graph is never run")
