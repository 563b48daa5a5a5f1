"""One forward of one region in one autograd graph: what it saved, and how to get it back.

While the region's forward runs, `ForwardMode` sees every operator and `Frame.pack` every tensor that autograd saves. What is captured leaves
for the host; autograd gets a small object instead of each tensor:

* `View`: a captured tensor or a region input. Backward gets it straight from the host copy.
* `Holder`: anything else that the region made. The first one that backward asks for starts a recompute pass of the region, under
  `RecomputeMode`, which gives all of them.
* `Held`: a tensor from outside (a mask, a parameter's view): kept by reference.

The frame lives as long as the graph does, so several graphs can be in flight, in any order, and backward can run more than once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from memplug.errors import RecomputeError
from memplug.execute import operators
from memplug.execute.ambient import Ambient
from memplug.execute.tape import Action, Form, Tape, storage_of
from memplug.execute.transfer import Swapped, swappable

if TYPE_CHECKING:
    from memplug.execute.tokenwise import Executor, Region


class Kept:
    """A captured tensor that stays on the device: small, or kept by plan."""

    __slots__ = ("tensor", "written")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()
        self.written = False  # the forward went on to write to it: a recompute pass will too


class View:
    """What autograd holds for a saved view of a captured tensor."""

    __slots__ = ("frame", "part", "size", "stride", "offset")

    def __init__(self, frame: Frame, part: Swapped | Kept, tensor: torch.Tensor):
        self.frame, self.part = frame, part
        self.size, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()


class Holder:
    """What autograd holds for a saved tensor that only a recompute pass can give back; `index` counts the frame's packs."""

    __slots__ = ("frame", "index", "size", "dtype", "__weakref__")

    def __init__(self, frame: Frame, index: int, tensor: torch.Tensor):
        self.frame, self.index, self.size, self.dtype = frame, index, tensor.shape, tensor.dtype


class Held:
    """A tensor from outside the region that is kept by reference: a saved tensor, or a region input."""

    __slots__ = ("tensor", "version", "requires_grad")

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.version, self.requires_grad = tensor.detach(), tensor._version, tensor.requires_grad

    def get(self) -> torch.Tensor:
        """The tensor; an error where autograd would raise one too: it was modified in place since."""
        _check_version(self.tensor, self.version)
        return self.tensor


class Capture:
    """The captured outputs of one operator, in the shape of what it returned."""

    __slots__ = ("parts", "is_tuple", "whole", "rng_after")

    def __init__(self, parts: list[Any], is_tuple: bool, whole: bool, rng_after: torch.Tensor | None):
        self.parts = parts  # per output: Swapped, Kept, or the value itself where it is no tensor
        self.is_tuple = is_tuple
        self.whole = whole
        self.rng_after = rng_after  # generator state that the operator left behind, where it drew random numbers


class Diverged(Exception):
    """The recompute pass ran another operator than the forward did."""


class Frame:
    """See the module's text. Made by `Executor.run`; nothing but the autograd graph keeps it alive."""

    def __init__(self, executor: Executor, region: Region, call: Callable[..., Any], args: Any, kwargs: Any):
        self.executor = executor
        self.region = region
        self.call = call
        self.direct = executor.direct(region)
        self.timed = executor.timing
        self.tape = Tape()
        self.captures: dict[int, Capture] = {}
        self.launches: set[int] = set()
        self.swapped: list[Swapped] = []  # in the order of their copies out
        self.todo: list[Swapped] = []  # away and needed in backward, the soonest last
        self.storages: dict[int, Swapped | Kept] = {}  # while the forward runs
        self.holders: list[weakref.ref[Holder] | None] = []
        self.actions: list[Action] = []
        self.recomputed: dict[int, tuple[torch.Tensor, int]] = {}
        self.outstanding_bytes = 0
        self.saved_bytes = 0
        self.writes_input = False
        self._counted: set[int] = set()
        self.input_bytes = 0
        self.ambient = Ambient(executor.device)
        self.previous: weakref.ref[Frame] | None = executor.newest
        flat, self.spec = tree_flatten((args, kwargs))
        self.inputs = [self._input(value) for value in flat]

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Run the region's forward once and note it. Shapes and values are those of the region's own forward."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)
        begin = self.executor.device.stamp() if self.timed else None
        with self.ambient.during_forward(), hooks, ForwardMode(self):
            out = self.call(*args, **kwargs)
        if self.timed:
            self.tape.span = (begin, self.executor.device.stamp())
        self._close(out)
        return out

    # -- forward -------------------------------------------------------------------------------------------------------------------

    def _input(self, value: Any) -> Any:
        """A region input: swapped whole where gradients flow through it, else held."""
        if not isinstance(value, torch.Tensor):
            return value
        swaps = value.requires_grad and not value.is_leaf and self.executor.worth_swapping(value)
        part = self.executor.swap_input(value) if swaps else None
        if part is None:
            return Held(value)
        if not part.uses:
            self.input_bytes += part.nbytes
        self.swapped.append(part)
        self.storages[storage_of(value)] = part
        return part

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd's pack hook during forward."""
        index = len(self.holders)
        self.holders.append(None)
        if isinstance(tensor, torch.nn.Parameter) and not self.executor.regathers:
            return tensor
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return Held(tensor)
        with self.executor.paused():
            number = self.tape.number(tensor)
            if number is not None:
                self.tape.asked.add(number)
            part = self.storages.get(storage_of(tensor))
            if part is not None and self.direct and _can_view(part, tensor):
                if isinstance(part, Swapped):
                    part.uses += 1
                self._saves(tensor)
                return View(self, part, tensor)
            given = number is None or number in self.tape.given
            if given and part is None and not (self.executor.regathers and _is_parameter(tensor)):
                return Held(tensor)
            if number is not None:
                self.tape.saved.add(number)
            self._saves(tensor)
        holder = Holder(self, index, tensor)
        self.holders[index] = weakref.ref(holder)
        return holder

    def _saves(self, tensor: torch.Tensor) -> None:
        """Count a saved storage once: what full recomputation would have on the device at once."""
        address = storage_of(tensor)
        if address not in self._counted:
            self._counted.add(address)
            self.saved_bytes += tensor.untyped_storage().nbytes()

    def capture(self, index: int, func: Any, args: Any, kwargs: dict[str, Any], out: Any, fraction: float, keep: bool) -> None:
        """Start the outputs of one operator on their way to the host, the first `fraction` of the rows of each."""
        outputs = list(out) if isinstance(out, (tuple, list)) else [out]
        rows = round(fraction * outputs[0].shape[0]) if outputs[0].dim() else 0
        whole = rows == (outputs[0].shape[0] if outputs[0].dim() else 0)
        kind = operators.kind_of(func)
        if not whole and (kind is not operators.Kind.ROWS or not operators.splits_by_rows(func, args)):
            whole, rows = fraction >= 0.5, 0
        if not whole and rows == 0:
            return
        parts: list[Any] = []
        for value in outputs:
            part = self._part(value, None if whole else rows, keep, kind)
            if part is None and isinstance(value, torch.Tensor):
                return  # the host is full: recomputed instead; parts that did leave are let go
            parts.append(part)
        rng_after = self.executor.device.get_rng_state() if operators.draws(func, args, kwargs) else None
        self.captures[index] = Capture(parts, isinstance(out, (tuple, list)), whole, rng_after)
        for value, part in zip(outputs, parts, strict=True):
            if isinstance(value, torch.Tensor):
                self.storages[storage_of(value)] = part
            if isinstance(part, Swapped):
                self.swapped.append(part)
        if kind is operators.Kind.COLLECTIVE:
            launch = self.tape.maker_of(args[0])
            if launch is not None:
                self.launches.add(launch)

    def _part(self, value: Any, rows: int | None, keep: bool, kind: operators.Kind | None) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if keep or not self.executor.worth_swapping(value):
            return Kept(value) if rows is None else None
        part = self.executor.transfer.offload(value, value.shape[0] if rows is None else rows)
        if part is None and kind in (operators.Kind.COLLECTIVE, operators.Kind.CHOICE):
            return Kept(value)  # recomputing it alone would leave other ranks waiting, or choose differently
        return part

    def before_write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """An operator is about to write in place: what is captured must keep the value of now."""
        for tensor in operators.written_arguments(func, args, kwargs):
            part = self.storages.pop(storage_of(tensor), None)
            if isinstance(part, Swapped):
                self.executor.transfer.before_write(part)
                self.writes_input = self.writes_input or part in self.inputs
            elif part is not None:
                part.tensor, part.written = part.tensor.clone(), True

    def _close(self, out: Any) -> None:
        """The forward is over: decide what a recompute pass does, and let go of what it does not need."""
        for value in tree_flatten(out)[0]:
            if isinstance(value, torch.Tensor) and type(value) is torch.Tensor:
                part = self.storages.get(storage_of(value))
                if isinstance(part, Swapped) and part.resident and swappable(value):
                    part.watch(value)
        self.actions = self.tape.actions({i: c.whole for i, c in self.captures.items()}, self.launches)
        recomputes = any(holder is not None for holder in self.holders)
        for part in self.inputs:
            if isinstance(part, Swapped) and recomputes:
                part.uses += 1
        for index, capture in list(self.captures.items()):
            substituted = recomputes and self.actions[index] is Action.SUBSTITUTE
            for part in capture.parts:
                if isinstance(part, Swapped):
                    part.uses += substituted
            used = substituted or any(getattr(part, "uses", 0) for part in capture.parts)
            if not used and operators.kind_of(self.tape.records[index].func) is not operators.Kind.CHOICE:
                self.region.unneeded.add((index, self.tape.records[index].func))
        self.swapped = [part for part in self.swapped if part.uses]
        for part in self.swapped:
            part.uses_left = part.uses
        self.executor.note(self)
        self.storages.clear()
        self._counted.clear()
        self.tape.close()

    # -- between -------------------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Two regions later: wait for this frame's copies out, and let the device memory go."""
        self.executor.transfer.release(self.swapped)
        away = [part for part in self.swapped if part.tensor is None]
        self.todo = away[::-1] if any(h is not None for h in self.holders) else away

    # -- backward ------------------------------------------------------------------------------------------------------------------

    def consume(self, part: Swapped) -> None:
        """One read of the part is done; after the last in this backward pass, its device memory goes."""
        part.uses_left -= 1
        if part.uses_left <= 0:
            part.uses_left = part.uses
            self.executor.transfer.drop(part)

    def restore(self, holder: Holder) -> torch.Tensor:
        """The saved tensor behind a holder; the first call runs the recompute pass, as does the first of a further backward."""
        if holder.index not in self.recomputed:
            with self.executor.guard("recompute", self.region):
                self._recompute()
        tensor, version = self.recomputed.pop(holder.index)
        self._count(-_bytes(tensor))
        if tensor.shape != holder.size or tensor.dtype != holder.dtype:
            raise RecomputeError(
                f"region {self.region.name}: a saved tensor was {tuple(holder.size)} {holder.dtype} in forward and is "
                f"{tuple(tensor.shape)} {tensor.dtype} when recomputed"
            )
        _check_version(tensor, version)
        return tensor

    def _recompute(self) -> None:
        self._forget()
        begin = self.executor.device.stamp() if self.timed else None
        try:
            self._run(RecomputeMode(self))
        except Diverged as divergence:
            if self.launches or self.tape.communicates:
                raise RecomputeError(f"region {self.region.name}: {divergence}") from None
            self.executor.diverged(self.region, str(divergence))
            self._forget()
            self._run(contextlib.nullcontext())
        if self.timed:
            self.tape.recompute_span = (begin, self.executor.device.stamp())

    def _run(self, mode: Any) -> None:
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
            with self.ambient.during_recompute(self.tape.random), torch.enable_grad(), hooks, mode:
                self.call(*args, **kwargs)
        finally:
            executor.recomputing -= 1
        del args, kwargs, values
        for item in self.inputs:
            if isinstance(item, Swapped):
                self.consume(item)
        if count != len(self.holders):
            raise RecomputeError(
                f"region {self.region.name}: forward saved {len(self.holders)} tensors for backward, the recompute pass {count}"
            )

    def _value(self, item: Any) -> Any:
        if isinstance(item, Swapped):
            tensor, _ = self.executor.transfer.acquire(item)
            value = tensor.detach().requires_grad_()
            return value.clone() if self.writes_input else value  # autograd forbids writing to a leaf
        return item.get().detach().requires_grad_(item.requires_grad) if isinstance(item, Held) else item

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


def unpack(packed: Any) -> torch.Tensor:
    """Autograd's unpack hook: what `Frame.pack` returned, as a tensor again."""
    if isinstance(packed, torch.Tensor):
        return packed
    if isinstance(packed, Held):
        return packed.get()
    frame = packed.frame
    if frame.timed and frame.tape.backward_begin is None:
        frame.tape.backward_begin = frame.executor.device.stamp()
    frame.executor.pump(frame)
    if isinstance(packed, Holder):
        return frame.restore(packed)
    part = packed.part
    if isinstance(part, Kept):
        return part.tensor.as_strided(packed.size, packed.stride, packed.offset)
    if part.mutated:
        raise RuntimeError(_IN_PLACE)
    tensor, _ = frame.executor.transfer.acquire(part)
    view = tensor.as_strided(packed.size, packed.stride, packed.offset)
    frame.consume(part)
    return view


class ForwardMode(TorchDispatchMode):
    """Notes every operator of a region's forward and captures the outputs that the policy names."""

    def __init__(self, frame: Frame):
        super().__init__()
        self.frame = frame

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame, kwargs = self.frame, kwargs or {}
        if frame.executor.pauses or _foreign(types):
            return func(*args, **kwargs)
        if operators.is_mutable(func):
            frame.before_write(func, args, kwargs)
        device = frame.executor.device
        begin = device.stamp() if frame.timed else None
        out = func(*args, **kwargs)
        index = frame.tape.add(func, args, kwargs, out)
        if frame.timed:
            frame.tape.records[index].stamps = (begin, device.stamp())
        fraction, keep = frame.region.decide(index, func)
        if fraction > 0 and (frame.tape.records[index].form is Form.PURE or operators.kind_of(func)):
            frame.capture(index, func, args, kwargs, out, fraction, keep)
        return out


class RecomputeMode(TorchDispatchMode):
    """Replays a region's forward: captured outputs are put in, dead operators left out, the rest runs."""

    def __init__(self, frame: Frame):
        super().__init__()
        self.frame = frame
        self.index = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame, kwargs = self.frame, kwargs or {}
        if frame.executor.pauses or _foreign(types):
            return func(*args, **kwargs)
        index, records = self.index, frame.tape.records
        self.index += 1
        if index >= len(records) or records[index].func is not func:
            expected = records[index].func if index < len(records) else "the end"
            raise Diverged(f"the recompute pass ran {func} as operator {index} where forward had {expected}")
        action = frame.actions[index]
        if action is Action.RUN:
            return func(*args, **kwargs)
        if action is Action.SUBSTITUTE:
            return self._substitute(frame.captures[index], func, args, kwargs)
        return self._skip(records[index], func, args, kwargs)

    def _substitute(self, capture: Capture, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        frame = self.frame
        values = []
        for part in capture.parts:
            if isinstance(part, Swapped):
                tensor, rows = frame.executor.transfer.acquire(part)
                if rows < tensor.shape[0]:
                    operators.recompute_rows(func, args, kwargs, tensor, rows)
                values.append(tensor.detach())
                frame.consume(part)
            else:
                values.append(_kept_value(part) if isinstance(part, Kept) else part)
        if capture.rng_after is not None:
            frame.executor.device.set_rng_state(capture.rng_after)
        return tuple(values) if capture.is_tuple else values[0]

    def _skip(self, record: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if record.form is Form.WRITE:
            written = operators.written_arguments(func, args, kwargs)
            return written[0] if len(record.shapes) == 1 else tuple(written)
        empty = self.frame.executor.empty
        values = [empty(*shape) if isinstance(shape, tuple) and len(shape) == 4 else shape for shape in record.shapes]
        return values[0] if len(func._schema.returns) == 1 and not _returns_list(func) else tuple(values)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def _kept_value(part: Kept) -> torch.Tensor:
    return part.tensor.clone() if part.written else part.tensor.detach()


def _returns_list(func: Any) -> bool:
    return isinstance(func._schema.returns[0].type, torch.ListType)


def _foreign(types: Any) -> bool:
    """Tensor subclasses with a dispatch of their own are left to it."""
    return any(kind is not torch.Tensor and kind is not torch.nn.Parameter for kind in types)


def _can_view(part: Swapped | Kept, tensor: torch.Tensor) -> bool:
    if isinstance(part, Swapped):
        return part.whole and not part.mutated and part.dtype == tensor.dtype
    return part.tensor.dtype == tensor.dtype


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace operation"


def _check_version(tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(f"{_IN_PLACE}: {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}")


def _never(packed: Any) -> torch.Tensor:
    raise AssertionError("the recompute pass's own graph is never run")
