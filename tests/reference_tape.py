"""A tape that a dispatch mode notes in Python, which the native one is compared with: the operators of one forward,
what storages they read and made, and what a recompute pass must do with each of them .

The tape keeps names, not tensors. Storages are named by a running number; while the forward runs, by their address too,
which is then kept from being reused.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from memplug.execute import operators
from memplug.execute.operators import tensors_in, written_arguments


class Form(enum.Enum):
    """How an operator touches memory."""

    VIEW = "view"  # its outputs share the storage of an input
    WRITE = "write"  # it writes to an argument
    PURE = "pure"  # it makes new storages from its inputs, and that is all it does
    FIXED = (
        "fixed"  # it must run in every recompute pass: random, or other ranks take part, or it has effects of its own
    )
    EXCHANGE = "exchange"  # other ranks take part, and its outputs are arguments that it writes to
    VALUE = "value"  # Python gets a number from it, and the same number in every recompute pass: control flow repeats


def is_plain(kind: type) -> bool:
    """Whether tensors of this type are what their memory says: no wrapper with a dispatch of its own."""
    return kind is torch.Tensor or kind is torch.nn.Parameter


def _gives_subclass(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and not is_plain(type(out))


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage object: valid as a name only while the tensor lives."""
    return tensor.untyped_storage()._cdata


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is all of its storage, be it empty: a rank whose experts get no tokens exchanges nothing."""
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


class Record:
    """One operator of the tape. `inputs` and `outputs` are storage numbers; `outputs` are those that it made."""

    __slots__ = ("func", "form", "inputs", "outputs", "shapes", "root", "capturable", "stamps")

    def __init__(
        self, func: Any, form: Form, inputs: tuple[int, ...], outputs: tuple[int, ...], shapes: list[Any], root: bool
    ):
        self.func = func
        self.form = form
        self.inputs = inputs
        self.outputs = outputs
        self.shapes = shapes  # per output (size, stride, dtype, device), or the value itself where it is no tensor
        self.root = root  # it counts as needed whether or not anything reads its outputs
        self.capturable = (form is Form.PURE and not operators.is_factory(func)) or operators.kind_of(func) is not None
        self.stamps: Any = None  # device times before and after, where the profile asked for them


class Tape:
    """Operators of one forward in program order.

    Storages that no operator on the tape made (region inputs, parameters, constants) are *given*: a recompute pass
    finds them there.

    Some work is on no tape: kernels launched on addresses (Triton, pybind), Python reading memory (`tolist`, `numpy`),
    tensor subclasses. A forward that gives a sign of it is `opaque`: nothing is skipped, since nobody knows what was
    read.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.saved: set[int] = set()  # storages that backward asks for and only a recompute pass can give
        self.asked: set[int] = set()  # storages that backward asks for, in whatever way
        self.read: set[int] = set()  # storages that Python reads: a recompute pass must find the same there
        self.given: set[int] = set()
        self.spared: set[int] = set()  # exchanges that no recompute pass runs again
        self.fetched: set[int] = set()  # storages that such an exchange filled, and a recompute pass puts in
        self.bytes: dict[int, int] = {}
        self.random = False
        self.communicates = False
        self.opaque = False
        self.blank: set[int] = set()  # storages whose contents no operator has written
        self.span: Any = None  # (begin, end) stamps of the forward, where the profile asked for them
        self.recompute_span: Any = None
        self.backward_begin: Any = None
        self._names: dict[int, int] = {}
        # while these are held, no other storage gets the address of one that is gone, seen or unseen
        self._addresses: list[StorageWeakRef] = []

    def add(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
        """Note one operator; returns its index."""
        if operators.is_exchange(func):
            return self._add_exchange(func, args, kwargs)
        inputs = tuple(self._name(tensor) for tensor in tensors_in(args))
        if kwargs:
            inputs += tuple(self._name(tensor) for tensor in tensors_in(list(kwargs.values())))
        outputs, shapes = self._outputs(inputs, out)
        form, root = Form.PURE if outputs else Form.VIEW, False
        if not is_ordinary(func) or _gives_subclass(out):
            form, root = self._special(func, args, kwargs, out, outputs, form)
        self.records.append(Record(func, form, inputs, outputs, shapes, root))
        return len(self.records) - 1

    def _special(
        self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, outputs: tuple[int, ...], form: Form
    ) -> tuple[Form, bool]:
        """Form and root of an operator that does more than read its inputs and make its outputs."""
        root = False
        if draws(func, args, kwargs):
            self.random = True
            # in-place draws (dropout masks) read nothing but the generator
            form, root = Form.FIXED, not operators.is_mutable(func)
        elif operators.is_communication(func):
            self.communicates = True
            form, root = Form.FIXED, True
        elif operators.has_effects(func) or _gives_subclass(out):
            form, root = Form.FIXED, True
        elif operators.gives_python_value(func):
            form = Form.VALUE
        elif operators.is_mutable(func):
            form = Form.WRITE
            root = any(self._name(tensor) in self.given for tensor in written_arguments(func, args, kwargs))
        if operators.leaves_memory_blank(func):
            self.blank.update(number for number in outputs if self.bytes[number])
        elif self.blank and operators.is_mutable(func):
            self.blank.difference_update(self._name(tensor) for tensor in written_arguments(func, args, kwargs))
        return form, root

    def _add_exchange(self, func: Any, args: Any, kwargs: dict[str, Any]) -> int:
        written = written_arguments(func, args, kwargs)
        outputs = tuple(self._name(tensor) for tensor in written)
        unread = () if operators.accumulates(func) else written
        given = (tensor for tensor in tensors_in(args) if not any(tensor is other for other in unread))
        inputs = tuple(self._name(tensor) for tensor in given)
        self.communicates = True
        self.blank.difference_update(outputs)
        self.records.append(Record(func, Form.EXCHANGE, inputs, outputs, [], root=True))
        return len(self.records) - 1

    def note_read(self, tensor: torch.Tensor, begin: int) -> None:
        """Python reads a tensor, or what the operators from index `begin` on have just made of it."""
        number = self.number(tensor)
        self.read.update(() if number is None else (number,))
        for record in self.records[begin:]:
            self.read.update(record.outputs)

    def sole_maker(self, index: int) -> int | None:
        """The operator that made the one storage that exchange `index` fills, where nobody saw the storage between the
        two: whoever gives the result need not run either.
        """
        (number,) = self.records[index].outputs or (None,)
        for before in range(index - 1, -1, -1):
            record = self.records[before]
            if record.form is Form.PURE and record.outputs == (number,) and len(record.shapes) == 1:
                return before
            if record.form is not Form.VIEW and number in (*record.inputs, *record.outputs):
                return None
        return None

    def number(self, tensor: torch.Tensor) -> int | None:
        """The number of a living tensor's storage; None when no operator touched it."""
        return self._names.get(storage_of(tensor))

    def close(self) -> None:
        """The forward is over: addresses no longer name storages. Memory that nobody was seen to fill was filled
        unseen.
        """
        self.opaque = self.opaque or bool(self.blank)
        self._names.clear()
        self._addresses.clear()

    def maker_of(self, tensor: torch.Tensor) -> int | None:
        """Index of the operator that made a living tensor's storage; None for a given one."""
        number = self.number(tensor)
        return next((i for i in range(len(self.records) - 1, -1, -1) if number in self.records[i].outputs), None)

    def _name(self, tensor: torch.Tensor) -> int:
        address = storage_of(tensor)
        number = self._names.get(address)
        if number is None:
            number = self._new(address, tensor)
            self.given.add(number)
        return number

    def _new(self, address: int, tensor: torch.Tensor) -> int:
        number = len(self.bytes)
        storage = tensor.untyped_storage()
        self._names[address] = number
        self._addresses.append(StorageWeakRef(storage))
        self.bytes[number] = storage.nbytes()
        return number

    def _outputs(self, inputs: tuple[int, ...], out: Any) -> tuple[tuple[int, ...], list[Any]]:
        outputs: list[int] = []
        shapes: list[Any] = []
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(item, torch.Tensor):
                shapes.append(item)
                continue
            shapes.append((item.shape, item.stride(), item.dtype, item.device))
            address = storage_of(item)
            if self._names.get(address) not in inputs:
                outputs.append(self._new(address, item))
        return tuple(outputs), shapes


@functools.cache
def is_ordinary(func: Any) -> bool:
    """Whether nothing is special about it: the operator reads its inputs and makes its outputs, like most."""
    special = (
        operators.is_communication,
        operators.is_random,
        operators.has_effects,
        operators.gives_python_value,
        operators.leaves_memory_blank,
        operators.is_mutable,
    )
    return not any(holds(func) for holds in special)


def draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call advances a random generator: an attention operator only does when its `dropout_p` is above
    zero.
    """
    return operators.is_random(func) and bool(_argument(func, args, kwargs, "dropout_p", True))


def _argument(func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str, absent: Any) -> Any:
    """The value of an argument by name: its default where it was not given, `absent` where there is none."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return absent


class Recording(TorchDispatchMode):
    """Notes what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tape.add(func, args, kwargs or {}, out)
        return out
