"""A reference tape, recorded in Python by a dispatch mode; tests compare native tapes with it.

It has the operators of one forward, the storages that they read, write and make, and what a recompute pass must do with
each operator.

The tape keeps names, not tensors. The name of a storage is a running number. While the forward runs, the tape finds
the number by the storage's address, which it keeps from being reused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from memplug.tokenwise.engine import operators
from memplug.tokenwise.engine.operators import tensors_in
from memplug.tokenwise.engine.tape import Form, Record, storage_of


class Tape:
    """Operators of one forward in program order, as records of memplug's own kind.

    Storages that no operator on the tape made (region inputs, parameters, constants) are *given*: a recompute pass
    finds them in place.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.given: set[int] = set()
        self.bytes: list[int] = []  # size of every storage
        self.blank: dict[int, np.ndarray] = {}  # storages without initial values: which bytes no operator has written
        self.reads_blank = False  # whether an operator read a byte that no operator had written
        self._names: dict[int, int] = {}
        # while the tape holds these, no new storage gets the address of a freed storage of the tape
        self._addresses: list[StorageWeakRef] = []

    def add(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Record one operator."""
        tensors = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        inputs = tuple(self._name(tensor) for tensor in tensors)
        written = tuple(map(self._name, written_arguments(func, args, kwargs))) if operators.is_mutable(func) else ()
        returned = list(tensors_in([out]))
        made = written if operators.is_exchange(func) else self._made(inputs, returned)
        form, root = Form.PURE if made else Form.VIEW, False
        if not is_ordinary(func):
            form, root = self._special(func, args, kwargs, written, form)
        if operators.leaves_memory_blank(func):
            self.blank.update({number: np.ones(self.bytes[number], bool) for number in made if self.bytes[number]})
        elif form is not Form.VIEW and not operators.is_factory(func):
            self._touch(func, args, kwargs, tensors)
        rows = returned[0].shape[0] if returned and returned[0].dim() else 0
        results = tuple(self._names[storage_of(tensor)] for tensor in returned)
        dimensions = tuple(tensor.dim() for tensor in tensors)
        drawn = draws(func, args, kwargs)
        self.records.append(Record(func, form, root, drawn, rows, inputs, made, written, results, dimensions))

    def has_unfilled(self) -> bool:
        """Return whether an operator read memory before it was filled, or a storage was never filled."""
        return self.reads_blank or any(bytes.all() for bytes in self.blank.values())

    def _touch(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Record the bytes that an operator reads and writes."""
        written = written_arguments(func, args, kwargs) if operators.is_mutable(func) else []
        adds = _argument(func, args, kwargs, "accumulate", False)
        in_part = operators.fills_in_part(func) and not adds
        ids = [id(tensor) for tensor in written] if operators.fills(func) or in_part else []
        for tensor in tensors:
            if id(tensor) in ids:
                ids.remove(id(tensor))
            else:
                self.read(tensor)
        for tensor in written:
            counted = (_argument(func, args, kwargs, name, None) for name in ("values", "source", "index"))
            scattered = next((each.numel() for each in counted if each is not None), 0) if in_part else 0
            if operators.fills(func) or scattered == tensor.numel() > 0:
                self._bytes_of(tensor)[...] = False

    def read(self, tensor: torch.Tensor) -> None:
        """Record that an operator reads a tensor, or that autograd saves it."""
        self.reads_blank = self.reads_blank or bool(self._bytes_of(tensor).any())

    def _bytes_of(self, tensor: torch.Tensor) -> np.ndarray:
        """Return which of a tensor's bytes are blank; an empty array for memory that had values from the start."""
        blank = self.blank.get(self._names.get(storage_of(tensor), -1))
        if blank is None or not tensor.numel():
            return np.zeros(0, bool)
        size = tensor.element_size()
        strides = (*(size * stride for stride in tensor.stride()), 1)
        return np.lib.stride_tricks.as_strided(blank[size * tensor.storage_offset() :], (*tensor.shape, size), strides)

    def close(self) -> None:
        """End the forward: addresses no longer name storages."""
        self._names.clear()
        self._addresses.clear()

    def _special(
        self, func: Any, args: Any, kwargs: dict[str, Any], written: tuple[int, ...], form: Form
    ) -> tuple[Form, bool]:
        """Return `Record.form` and `Record.root` of an operator that is not ordinary (`is_ordinary`)."""
        if operators.is_exchange(func):
            return Form.EXCHANGE, True
        if draws(func, args, kwargs):
            # in-place draws (dropout masks) read only the generator
            return Form.FIXED, not operators.is_mutable(func)
        if operators.is_communication(func) or operators.has_effects(func):
            return Form.FIXED, True
        if operators.gives_python_value(func):
            return Form.VALUE, False
        if operators.is_mutable(func) and (written or form is not Form.PURE):
            return Form.WRITE, not self.given.isdisjoint(written)
        return form, False

    def _name(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage; a storage new to the tape is given, and gets the next number."""
        number = self._names.get(storage_of(tensor))
        if number is None:
            number = self._new(tensor)
            self.given.add(number)
        return number

    def _new(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._names[storage_of(tensor)] = len(self.bytes)
        self._addresses.append(StorageWeakRef(storage))
        self.bytes.append(storage.nbytes())
        return len(self.bytes) - 1

    def _made(self, inputs: tuple[int, ...], returned: list[torch.Tensor]) -> tuple[int, ...]:
        made: list[int] = []
        for tensor in returned:
            if self._names.get(storage_of(tensor)) not in (*inputs, *made):
                made.append(self._new(tensor))
        return tuple(made)


@functools.cache
def is_ordinary(func: Any) -> bool:
    """Return whether an operator only reads its inputs and makes its outputs, as most do."""
    special = (
        operators.is_communication,
        operators.is_random,
        operators.has_effects,
        operators.gives_python_value,
        operators.is_mutable,
    )
    return not any(holds(func) for holds in special)


def draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether this call advances a random generator.

    An attention operator does so only if its `dropout_p` is above zero.
    """
    return operators.is_random(func) and bool(_argument(func, args, kwargs, "dropout_p", True))


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a mutable operator writes in place."""
    if operators.is_exchange(func):
        return [] if func._schema.name in operators._WRITES_NOTHING else list(tensors_in(args[:1]))
    values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    names = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    if func._schema.name in operators._STATISTICS and values.get("training", True):
        names += ["running_mean", "running_var"]
    return list(tensors_in([values.get(name) for name in names]))


def _argument(func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str, absent: Any) -> Any:
    """Return an argument by name: its default if it was not passed, `absent` if the operator has no such argument."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return absent


class Recording(TorchDispatchMode):
    """Records the operators that run inside the `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tape.add(func, args, kwargs or {}, out)
        return out
