"""One forward of one region in one autograd graph: what it saved, and how to get it back.

While the region's forward runs, `ForwardMode` sees every operator and `Frame.pack` every tensor that autograd saves.
What is captured leaves for the host; autograd gets a small object instead of each tensor:

* `View`: a captured tensor or a region input. Backward gets it straight from the host copy.
* `Holder`: anything else that the region made. The first one that backward asks for starts a recompute pass of the
  region, under `RecomputeMode`, which gives all of them.
* `Held`: a tensor from outside (a mask, a parameter's view): kept by reference.

The frame lives as long as the graph does, so several graphs can be in flight, in any order, and backward can run more
than once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from memplug.errors import RecomputeError
from memplug.execute import garbage, operators
from memplug.execute.ambient import Ambient
from memplug.execute.buffers import Buffers
from memplug.execute.captures import Captures
from memplug.execute.modes import AddressMode, Diverged, ForwardMode, RecomputeMode
from memplug.execute.saved import (
    Held,
    Holder,
    View,
    can_view,
    check_version,
    is_parameter,
    leaf_of,
    unpack,
)
from memplug.execute.tape import Action, Tape, is_plain, storage_of
from memplug.execute.transfer import Swapped

if TYPE_CHECKING:
    from memplug.execute.tokenwise import Executor, Region


class Frame:
    """See the module's text. Made by `Executor.run`; nothing but the autograd graph keeps it alive."""

    def __init__(self, executor: Executor, region: Region, call: Callable[..., Any], args: Any, kwargs: Any):
        self.executor = executor
        self.region = region
        self.call = call
        self.direct = executor.direct(region)
        self.timed = executor.timing
        self.tape = Tape()
        self.captured = Captures(self.tape, region, executor)
        self.todo: list[Swapped] = []  # away and needed in backward, the soonest last
        self.holders: list[weakref.ref[Holder] | None] = []
        self.own: set[int] = set()  # storages from outside whose former value is safe, while the forward runs
        self.buffers = Buffers()
        self.actions: list[Action] = []
        self.recomputed: dict[int, tuple[torch.Tensor, int]] = {}
        self.outstanding_bytes = 0
        self.saved_bytes = 0  # of all storages that backward asks for
        self.pending_bytes = 0  # of those that a recompute pass, still to come, will make
        self.largest_saved_bytes = 0
        self.communicates = False  # a recompute pass launches collectives
        self.writes_input = False
        self._counted: set[int | None] = set()
        self.input_bytes = 0
        self.tape.opaque = region.opaque or region.hidden
        self.previous: weakref.ref[Frame] | None = executor.newest
        executor.born(self)
        self.ambient = Ambient(executor.device, executor.surroundings)
        flat, self.spec = tree_flatten((args, kwargs))
        self.inputs = [self._input(value) for value in flat]

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Run the region's forward once and note it. Shapes and values are those of the region's own forward."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)
        begin = self.executor.device.stamp() if self.timed else None
        watch = contextlib.nullcontext() if self.region.familiar else AddressMode(self)
        with self.ambient.during_forward(), garbage.outside(self.executor), hooks, ForwardMode(self), watch:
            out = self.call(*args, **kwargs)
        if self.timed:
            self.tape.span = (begin, self.executor.device.stamp())
        with self.executor.own:
            self._close()
        return out

    # -- forward -----------------------------------------------------------------------------------------------------

    def _input(self, value: Any) -> Any:
        """A region input: swapped whole where gradients flow through it, else held."""
        if not isinstance(value, torch.Tensor):
            return value
        swaps = value.requires_grad and not value.is_leaf and self.executor.worth_swapping(value)
        part = self.executor.swap_input(value, self.region.lingers) if swaps else None
        if part is None:
            return Held(value)
        if not part.uses:
            self.input_bytes += part.nbytes
        self.captured.swapped.append(part)
        self.captured.storages[storage_of(value)] = part
        return part

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd's pack hook during forward."""
        index = len(self.holders)
        self.holders.append(None)
        with self.executor.own, self.executor.paused():
            if not is_plain(type(tensor)) or isinstance(tensor, torch.nn.Parameter) and not self.executor.regathers:
                return Held(tensor)
            number = self.tape.number(tensor)
            if number is not None:
                self.tape.asked.add(number)
            part = self.captured.storages.get(storage_of(tensor))
            if part is not None and self.direct and can_view(part, tensor):
                if isinstance(part, Swapped):
                    part.uses += 1
                self._saves(tensor, number, captured=True)
                return View(self, part, tensor)
            given = not self.region.hidden and (number is None or number in self.tape.given)
            if given and part is None and not (self.executor.regathers and is_parameter(tensor)):
                return Held(tensor)
            if number is not None:
                self.tape.saved.add(number)
            self._saves(tensor, number, captured=part is not None)
        holder = Holder(self, index, tensor)
        self.holders[index] = weakref.ref(holder)
        return holder

    def _saves(self, tensor: torch.Tensor, number: int | None, captured: bool) -> None:
        """Count a saved storage once: what full recomputation would have on the device at once."""
        if number is None or number not in self._counted:
            self._counted.add(number)
            nbytes = tensor.untyped_storage().nbytes()
            self.saved_bytes += nbytes
            self.pending_bytes += 0 if captured else nbytes
            self.largest_saved_bytes = max(self.largest_saved_bytes, nbytes)

    def before_write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """An operator is about to write in place: what is captured must keep the value of now."""
        for tensor in operators.written_arguments(func, args, kwargs):
            number = self.tape.number(tensor)
            part = self.captured.storages.pop(storage_of(tensor), None)
            if isinstance(part, Swapped):
                self.executor.transfer.before_write(part)
                if part in self.inputs:
                    self.writes_input = True
                    self.own.add(storage_of(tensor))
            elif part is not None:
                part.before_write()
            elif number is None or number in self.tape.given:
                self._before_foreign_write(tensor)

    def _before_foreign_write(self, tensor: torch.Tensor) -> None:
        """Memory that was there before the region: a recompute pass must find its value of now, and leave no trace."""
        address = storage_of(tensor)
        if address in self.own or self.executor.is_scratch(tensor):
            return
        for item in self.inputs:
            if isinstance(item, Held) and is_plain(type(item.tensor)) and storage_of(item.tensor) == address:
                item.before_write()
                self.own.add(address)
        if address not in self.own:
            self.own.add(address)
            self.buffers.note(tensor)

    def _close(self) -> None:
        """The forward is over: decide what a recompute pass does, and let go of what it does not need."""
        self.tape.close()
        self._decide()
        recomputes = any(holder is not None for holder in self.holders)
        for part in self.inputs:
            if isinstance(part, Swapped) and recomputes:
                part.uses += 1
        asked = self.captured.asked_of_ranks()
        for index, capture in list(self.captured.by_operator.items()):
            substituted = recomputes and self.actions[index] is Action.SUBSTITUTE
            for part in capture.parts:
                if isinstance(part, Swapped):
                    part.uses += substituted
            used = substituted or index in asked or any(getattr(part, "uses", 0) for part in capture.parts)
            if not used and operators.kind_of(self.tape.records[index].func) is not operators.Kind.CHOICE:
                self.region.unneeded[index] = self.tape.records[index].func
        self.captured.swapped = [part for part in self.captured.swapped if part.uses]
        for part in self.captured.swapped:
            part.uses_left = part.uses
        self.executor.note(self)
        self.executor.trim(self)
        self.captured.storages.clear()
        self.own.clear()
        self._counted.clear()

    def _decide(self) -> None:
        self.actions = self.tape.actions(
            {i: c.whole for i, c in self.captured.by_operator.items()}, self.captured.launches
        )
        asked = [i for i, c in self.captured.by_operator.items() if c.absent and self.actions[i] is Action.SUBSTITUTE]
        if asked:  # this forward is another than those before: run the collectives again after all
            for index in asked:
                del self.captured.by_operator[index]
            self.captured.launches = {
                launch: index for launch, index in self.captured.launches.items() if index in self.captured.by_operator
            }
            self.region.unneeded.clear()
            self._decide()
        runs = (
            record.func for record, action in zip(self.tape.records, self.actions, strict=True) if action is Action.RUN
        )
        self.communicates = any(map(operators.is_communication, runs))

    # -- between -----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Two regions later: wait for this frame's copies out, and let the device memory go."""
        self.region.released = True
        self.executor.transfer.release(self.captured.swapped)
        away = [part for part in self.captured.swapped if part.tensor is None]
        self.todo = away[::-1] if any(h is not None for h in self.holders) else away

    # -- backward ----------------------------------------------------------------------------------------------------

    def consume(self, part: Swapped) -> None:
        """One read of the part is done; after the last in this backward pass, its device memory goes."""
        part.uses_left -= 1
        if part.uses_left <= 0:
            part.uses_left = part.uses
            self.executor.transfer.drop(part)

    def restore(self, holder: Holder) -> torch.Tensor:
        """The saved tensor behind a holder; the first call runs the recompute pass, as does the first of a further
        backward.
        """
        if holder.index not in self.recomputed:
            with self.executor.guard("recompute", self.region):
                self._recompute()
        tensor, version = self.recomputed.pop(holder.index)
        self._count(-_bytes(tensor))
        self.executor.lend(tensor)
        if tensor.shape != holder.size or tensor.dtype != holder.dtype:
            raise RecomputeError(
                f"region {self.region.name}: a saved tensor was {tuple(holder.size)} {holder.dtype} in forward and is "
                f"{tuple(tensor.shape)} {tensor.dtype} when recomputed"
            )
        check_version(tensor, version)
        return tensor

    def _recompute(self) -> None:
        self._forget()
        begin = self.executor.device.stamp() if self.timed else None
        try:
            if self.region.hidden:
                self._run(contextlib.nullcontext(), _done)
            else:
                mode = RecomputeMode(self)
                self._run(mode, mode.finish)
        except Diverged as divergence:
            if self.captured.launches or self.tape.communicates:
                raise RecomputeError(f"region {self.region.name}: {divergence}") from None
            self.executor.diverged(self.region, str(divergence))
            self._forget()
            self._run(contextlib.nullcontext(), _done)
        self.pending_bytes = 0
        if self.timed:
            self.tape.recompute_span = (begin, self.executor.device.stamp())

    def _run(self, mode: Any, finish: Callable[[], None]) -> None:
        executor = self.executor
        executor.pump(self)
        values = [self._value(item) for item in self.inputs]
        args, kwargs = tree_unflatten(values, self.spec)
        count = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            if count < len(self.holders):
                self._store(count, tensor)
            count += 1

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _never)
        executor.recomputing += 1
        try:
            with (
                self.buffers.as_before(),
                self.ambient.during_recompute(self.tape.random),
                torch.enable_grad(),
                garbage.outside(executor),
                hooks,
                mode,
            ):
                self.call(*args, **kwargs)
                finish()
        finally:
            executor.recomputing -= 1
        del args, kwargs, values
        for item in self.inputs:
            if isinstance(item, Swapped):
                self.consume(item)
        if count != len(self.holders):
            raise RecomputeError(
                f"region {self.region.name}: forward saved {len(self.holders)} tensors for backward, "
                f"the recompute pass {count}"
            )

    def _value(self, item: Any) -> Any:
        if isinstance(item, Swapped):
            tensor, _ = self.executor.transfer.acquire(item)
            return leaf_of(tensor, True, self.writes_input)
        return leaf_of(item.get(), item.requires_grad, item.written) if isinstance(item, Held) else item

    def _store(self, index: int, tensor: torch.Tensor) -> None:
        reference = self.holders[index]
        if reference is None or reference() is None:
            return
        with self.executor.paused():
            self.recomputed[index] = (tensor.detach(), tensor._version)
        self._count(_bytes(tensor))

    def _forget(self) -> None:
        self.recomputed.clear()
        self._count(-self.outstanding_bytes)

    def _count(self, nbytes: int) -> None:
        self.outstanding_bytes += nbytes
        self.executor.recomputed_bytes += nbytes

    def __del__(self) -> None:
        self.executor.gone(self)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _done() -> None:
    """Nothing to check at the end."""


def _never(packed: Any) -> torch.Tensor:
    raise AssertionError("the recompute pass's own graph is never run")
