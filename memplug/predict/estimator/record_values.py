"""`memplug.record_values`: records the tensor values that a real step reads, so that the step can be estimated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from memplug.errors import EstimateError
from memplug.files import path_of
from memplug.predict.estimator.calls import Calls, ModuleCall, line
from memplug.predict.estimator.values import COPY, MOST_BYTES, NUMBER, Output, Read, Values, modules_of
from memplug.torch_private import TorchDispatchMode, tree_leaves

_COPIES = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
"""Position of the copied argument, by operator."""
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
"""Functions that copy a GPU tensor to the host; for a CPU tensor they run no operator."""


@contextlib.contextmanager
def record_values(model: nn.Module, file: str | Path) -> Iterator[None]:
    """Record the tensor values that the program reads in one real training step, and write them to a file.

    Run the step inside the context, on a GPU or on the CPU:

        with memplug.record_values(model, "values.json"):
            model(**batch).loss.backward()
        memplug.estimate(make_model, inputs, trace="values.json")

    For each read the file has an entry, by module and source line: a number (`.item()`, `if x > 0`), a small tensor
    that is copied to the host (`.tolist()`, `.cpu()`), or the sizes of an output whose sizes depend on values
    (`nonzero`). The virtual device has no values, and answers such reads from the file. The step must not be compiled,
    and must have the estimate's batch and sequence length. Only reads in the first micro-batch's forward and backward
    are recorded.

    Args:
        model: The model that trains, or a wrapper of it. Inside the context its modules have subclasses of their own
            classes.
        file: The JSON file, written when the context ends.

    Raises:
        EstimateError: No forward of the model ran, or the file cannot be written.
    """
    file = path_of(file, "trace of values (.json)", EstimateError)
    recorder = _Recorder(model)
    try:
        with recorder.operators, recorder.functions:
            yield
    finally:
        recorder.calls.undo()
    recorder.values().write(file)


class _Recorder:
    def __init__(self, model: nn.Module):
        self.calls = Calls(modules_of(model), began=self._begin)
        self.operators, self.functions = _Operators(self), _Functions(self)
        self._device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        self._found: dict[str, list[list[Read]]] = {}
        self._backward: list[Read] = []
        self._on_the_host = WeakTensorKeyDictionary()

    def values(self) -> Values:
        """Return all recorded reads. If all calls of a module read the same values, keep only its first call."""
        if not self.calls.forwards:
            raise EstimateError(
                "no forward of the model ran while its values were recorded",
                "Give `memplug.record_values` the model that the step calls.",
            )
        found = {path: calls for path, calls in self._found.items() if any(calls)}
        alike = {path: all(call == calls[0] for call in calls) for path, calls in found.items()}
        return Values(
            calls={path: calls[:1] if alike[path] else calls for path, calls in found.items()}, backward=self._backward
        )

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operator that ran, if its result depends on values."""
        if torch.Tag.data_dependent_output in func.tags:
            # On the virtual device allclose reads a number. A dispatch mode, such as this recorder, sees only allclose
            # itself.
            name = NUMBER if func is torch.ops.aten.allclose.default else func._schema.name
            self._add(name, (args, kwargs), (_whole(torch.tensor(result)),))
        elif torch.Tag.dynamic_output_shape in func.tags and _has_a_mask(func, args):
            outputs = (each for each in tree_leaves(result) if isinstance(each, torch.Tensor))
            made = tuple(Output(dtype=_name(each.dtype), sizes=tuple(each.shape)) for each in outputs)
            self._add(func._schema.name, (args, kwargs), made)
        elif func in _COPIES and result.device.type == "cpu" != self._device:
            self._copy(args[_COPIES[func]])

    def function(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record the copy to the host that a call such as `.cpu()` makes on a GPU.

        Only a model on the CPU needs this: there such a call runs no operator, so `operator` does not see it.
        """
        if self._device != "cpu":
            return
        copies = func is torch.Tensor.to and any(each == "cpu" for each in args[1:] if isinstance(each, str))
        if func is torch.Tensor.cpu or copies:
            self._copy(args[0])
            # On the CPU the call returns its argument; on a GPU a host tensor, whose reads copy nothing.
            self._on_the_host[args[0]] = True
        elif func in _READS and args[0] not in self._on_the_host:
            self._copy(args[0])

    def _copy(self, source: torch.Tensor) -> None:
        if source.device.type == self._device and source.nbytes <= MOST_BYTES:
            self._add(COPY, source, (_whole(source.detach()),))

    def _add(self, operator: str, inputs: Any, outputs: tuple[Output, ...]) -> None:
        call = self.calls.now
        tensors = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor)]
        sizes = tuple(tuple(each.shape) for each in tensors if each.device.type == self._device)
        if call is None or call.recomputes or self.calls.forwards > 1 or not sizes:
            return
        read = Read(line=line(), operator=operator, inputs=sizes, outputs=outputs)
        (self._backward if call.path is None else self._found[call.path][call.number]).append(read)

    def _begin(self, call: ModuleCall) -> None:
        if self.calls.forwards <= 1 and not call.recomputes:
            self._found.setdefault(call.path, []).append([])


class _Operators(TorchDispatchMode):
    def __init__(self, recorder: _Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._recorder.operator(func, args, kwargs, result)
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: _Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._recorder.function(func, args, kwargs)
        return func(*args, **(kwargs or {}))


def _has_a_mask(func: Any, args: Any) -> bool:
    """Return whether an operator with torch's tag `dynamic_output_shape` has output sizes that depend on values.

    All do except `index`, whose output sizes depend on values only if an index is a mask.
    """
    masks = (torch.bool, torch.uint8)
    return func is not torch.ops.aten.index.Tensor or any(each is not None and each.dtype in masks for each in args[1])


def _whole(tensor: torch.Tensor) -> Output:
    return Output(dtype=_name(tensor.dtype), sizes=tuple(tensor.shape), values=tuple(tensor.cpu().flatten().tolist()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
