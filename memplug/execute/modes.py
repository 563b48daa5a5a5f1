"""The dispatch modes of a region: one that notes its forward, one that replays it, and one that notices what no
operator shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memplug.execute import operators
from memplug.execute.saved import Capture, Kept
from memplug.execute.tape import Action, Form, Record, is_plain
from memplug.execute.transfer import Swapped

if TYPE_CHECKING:
    from memplug.execute.frame import Frame


class Diverged(Exception):
    """The recompute pass ran another operator than the forward did."""


class ForwardMode(TorchDispatchMode):
    """Notes every operator of a region's forward and captures the outputs that the policy names."""

    def __init__(self, frame: Frame):
        super().__init__()
        self.frame = frame

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that keeps compilation out of the mode costs 5 % of a small region's forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.frame.executor.own:  # whoever watches has seen the operator before it came here
            return self._run(func, types, args, kwargs or {})

    def _run(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        frame = self.frame
        if frame.executor.pauses:
            return func(*args, **kwargs)
        if _foreign(types):
            if _waits(types):
                return NotImplemented
            frame.tape.opaque = True
            return func(*args, **kwargs)
        if operators.is_mutable(func):
            frame.before_write(func, args, kwargs)
        device = frame.executor.device
        begin = device.stamp() if frame.timed else None
        out = func(*args, **kwargs)
        index = frame.tape.add(func, args, kwargs, out)
        if frame.timed:
            frame.tape.records[index].stamps = (begin, device.stamp())
        if operators.is_exchange(func):
            out = operators.over(func, args, kwargs, out)
            if not frame.region.hidden:
                frame.captured.capture_exchange(index, func, args, kwargs)
                frame.executor.trim(frame)
            return out
        fraction, keep = frame.region.decide(index, func)
        if fraction > 0 and frame.tape.records[index].capturable:
            frame.captured.capture(index, func, args, kwargs, out, fraction, keep)
            frame.executor.trim(frame)
        elif fraction == 0 and operators.kind_of(func) is operators.Kind.COLLECTIVE and not frame.region.hidden:
            frame.captured.leave_out(index, args)
        return out


class AddressMode(TorchFunctionMode):
    """Notices what no operator shows: that a region's forward takes an address of memory, or lets Python read it."""

    def __init__(self, frame: Frame):
        super().__init__()
        self.frame = frame

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tape = self.frame.tape
        if self.frame.executor.pauses:
            return func(*args, **(kwargs or {}))
        tape.opaque = tape.opaque or func in _GIVES_ADDRESSES
        begin = len(tape.records)
        out = func(*args, **(kwargs or {}))
        if func in _GIVES_VALUES:
            tape.note_read(args[0], begin)
        return out


_GIVES_ADDRESSES = {torch.Tensor.data_ptr, torch.Tensor.__dlpack__, torch.utils.dlpack.to_dlpack}
_GIVES_VALUES = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}


class RecomputeMode(TorchDispatchMode):
    """Replays a region's forward: captured outputs are put in, dead operators left out, the rest runs."""

    def __init__(self, frame: Frame):
        super().__init__()
        self.frame = frame
        self.index = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that keeps compilation out of the mode costs 5 % of a small region's forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame, kwargs = self.frame, kwargs or {}
        if frame.executor.pauses or _foreign(types):
            return NotImplemented if _foreign(types) and _waits(types) else func(*args, **kwargs)
        index, records = self.index, frame.tape.records
        self.index += 1
        if index >= len(records) or records[index].func is not func:
            expected = records[index].func if index < len(records) else "the end"
            raise Diverged(f"the recompute pass ran {func} as operator {index} where forward had {expected}")
        action = frame.actions[index]
        if index in frame.captured.launches:
            return self._collective(records[index], frame.captured.launches[index], func, args, kwargs)
        if index in frame.captured.by_operator and operators.kind_of(func) is operators.Kind.COLLECTIVE:
            # the launch, or what made the memory, gave the result already
            return operators.finished_exchange(func, args) if operators.is_exchange(func) else args[0]
        if action is Action.RUN:
            out = func(*args, **kwargs)
            if operators.has_dynamic_shape(func):
                self._check_shape(records[index], out)
            return operators.over(func, args, kwargs, out) if operators.is_exchange(func) else out
        capture = frame.captured.by_operator.get(index)
        if capture is not None and capture.rng_after is not None:
            frame.executor.device.set_rng_state(capture.rng_after)
        if action is Action.SUBSTITUTE:
            return self._substitute(capture, func, args, kwargs)
        return self._skip(records[index], func, args, kwargs)

    def finish(self) -> None:
        """The region's forward has returned: it must have run every operator."""
        if self.index < len(self.frame.tape.records):
            raise Diverged(
                f"the recompute pass ran {self.index} operators where forward had {len(self.frame.tape.records)}"
            )

    def _check_shape(self, record: Record, out: Any) -> None:
        for value, noted in zip(out if isinstance(out, (tuple, list)) else (out,), record.shapes, strict=True):
            if isinstance(value, torch.Tensor) and value.shape != noted[0]:
                raise Diverged(f"{record.func} gave {tuple(value.shape)} where forward had {tuple(noted[0])}")

    def _collective(self, record: Record, waited: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result is there from the launch on: who waits for it may go on with the memory that the launch
        returned.
        """
        if self.frame.actions[waited] is not Action.SUBSTITUTE:
            return self._skip(record, func, args, kwargs)
        result = self._substitute(self.frame.captured.by_operator[waited], func, args, kwargs)
        size, stride, _, _ = record.shapes[0]
        return result.as_strided(size, stride, 0)

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
                values.append(part.fresh() if isinstance(part, Kept) else part)
        return tuple(values) if capture.is_tuple else values[0]

    def _skip(self, record: Record, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if record.form is Form.WRITE:
            written = operators.written_arguments(func, args, kwargs)
            return written[0] if len(record.shapes) == 1 else tuple(written)
        empty = self.frame.executor.empty
        values = [empty(*shape) if isinstance(shape, tuple) and len(shape) == 4 else shape for shape in record.shapes]
        return values[0] if len(func._schema.returns) == 1 and not operators.returns_list(func) else tuple(values)


def _foreign(types: Any) -> bool:
    """Tensor subclasses with a dispatch of their own are left to it."""
    return not all(map(is_plain, types))


def _waits(types: Any) -> bool:
    """The result of a collective that waits when it is first used unwraps itself, and its operators come back plain."""
    return all(is_plain(kind) or kind.__name__ == "AsyncCollectiveTensor" for kind in types)
