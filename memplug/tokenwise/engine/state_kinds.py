"""Reads the state of each kind of Python object, puts it back, and finds the objects in it.

`memplug.tokenwise.engine.state` says which objects it follows (reads, and later puts back), and why.
"""

from __future__ import annotations

import collections
import enum
import functools
import io
import logging
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from memplug.packages import FRAMEWORKS
from memplug.tokenwise.engine.buffers import alias_of
from memplug.torch_private import is_functorch_wrapped_tensor

Result = TypeVar("Result")
_CONSTANT = (
    *(int, float, complex, str, bytes, type(None), type(Ellipsis), type, enum.Enum, re.Pattern, range, slice),
    *(types.ModuleType, types.BuiltinFunctionType, property, staticmethod, classmethod, weakref.ref, np.generic),
    *(threading.local, type(threading.Lock()), type(threading.RLock()), logging.Logger, io.FileIO, io.TextIOWrapper),
)
_LIBRARIES = {
    *(each.module for each in FRAMEWORKS),
    *("torch", "memplug", "transformer_engine", "transformer_engine_torch", "accelerate"),
    *("lightning", "pytorch_lightning", "apex", "flash_attn", "triton"),
}
"""Packages whose code is not the model's. Objects of their classes are not followed, since other code than the model's
may change them between a forward and its backward. The exceptions are tensors, modules, containers, objects of the
other classes in `_KINDS`, and objects of packages in `_MODELS`."""
_MODELS = {"transformers"}
_PLUMBING = set(vars(nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}


def is_same(one: Any, other: Any) -> bool:
    """Return whether two states consist of the same objects in the same order."""
    if isinstance(one, dict):
        return len(one) == len(other) and all(a is b and one[a] is other[b] for a, b in zip(one, other, strict=True))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other


class StateKind(NamedTuple):
    """A kind of Python object, with the functions that handle its state.

    Attributes:
        read: returns an object's state, a shallow copy.
        write: puts such a state back; None: the object itself never changes.
        inside: returns the objects in a state that have to be followed as well; None: there are none.
        is_same: returns whether two states of an object are the same.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None] | None
    inside: Callable[[Any], Iterable[Any]] | None = None
    is_same: Callable[[Any, Any], bool] = is_same


class UnknownObject(NamedTuple):
    """A kind of object that may change without any sign, so that its state cannot be put back."""

    name: str


class ObjectPart(NamedTuple):
    """A part of an object that is followed separately: a module's parameters, or the globals that a function names."""

    owner: Any
    live: dict[str, Any]
    names: Iterable[str] = ()


class Parameters(ObjectPart):
    """The parameters of a module.

    Only objects of class `nn.Parameter` itself are followed: frameworks exchange parameters for shards and views.
    """


class Globals(ObjectPart):
    """The variables of a Python module, as far as a function's code names them."""


def _once_for_each_class(function: Callable[[type], Result]) -> Callable[[type], Result]:
    """Cache a function's result for each class, only as long as the class exists.

    The cache must not keep a class alive: a class that is defined in a function may refer to a model.
    """
    known: weakref.WeakKeyDictionary[type, Result] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def kept(cls: type) -> Result:
        try:
            return known[cls]
        except KeyError:
            return known.setdefault(cls, function(cls))

    return kept


@_once_for_each_class
def kind_of(cls: type) -> StateKind | UnknownObject | None:
    """Return how to treat objects of a class; None if they are constant, or do not belong to the model."""
    if issubclass(cls, torch.Tensor):
        return _TENSOR if cls is torch.Tensor else None
    for base, kind in _KINDS.items():
        if issubclass(cls, base):
            has_attributes = base in _CONTAINERS and cls.__dictoffset__ != 0
            return _both(kind, _OBJECT) if has_attributes else kind
    package = cls.__module__.partition(".")[0]
    if issubclass(cls, _CONSTANT) or package in _LIBRARIES - _MODELS:
        return None
    if issubclass(cls, (io.BytesIO, io.StringIO, bytearray, memoryview)) or package == "array":
        return UnknownObject(cls.__qualname__)
    if cls.__dictoffset__ or _slots(cls):
        return _OBJECT
    is_known = package in sys.stdlib_module_names and not hasattr(cls, "__next__")
    return None if is_known else UnknownObject(cls.__qualname__)


def is_own(thing: Any) -> bool:
    """Return whether a class, function or Python module is the model's own code.

    Only then are attributes of the class, and globals of the function or Python module, followed.
    """
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    package = (name or "").partition(".")[0]
    return package not in _LIBRARIES and package not in sys.stdlib_module_names


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of class `torch.Tensor` itself and strided; not nested, quantized or of functorch."""
    is_wrapped = is_functorch_wrapped_tensor(tensor)
    strided = not is_wrapped and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return type(tensor) is torch.Tensor and strided


def _items(live: Mapping[Any, Any]) -> dict[Any, Any]:
    base = collections.OrderedDict if isinstance(live, collections.OrderedDict) else dict
    return dict(base.items(live))


def _write_dict(live: dict[Any, Any], state: dict[Any, Any]) -> None:
    base = collections.OrderedDict if isinstance(live, collections.OrderedDict) else dict
    now = _items(live)
    if list(now) != list(state):
        base.clear(live)
        now = {}
    for key, value in state.items():
        if now.get(key, now) is not value:
            base.__setitem__(live, key, value)


def _write_list(live: list[Any], state: list[Any]) -> None:
    list.__setitem__(live, slice(None), state)


def _write_deque(live: collections.deque[Any], state: list[Any]) -> None:
    collections.deque.clear(live)
    collections.deque.extend(live, state)


def _write_set(live: set[Any], state: list[Any]) -> None:
    set.clear(live)
    set.update(live, state)


def _read_object(live: Any) -> dict[str, Any]:
    state = dict(vars(live)) if hasattr(live, "__dict__") else {}
    return state | {name: getattr(live, name) for name in _slots(type(live)) if hasattr(live, name)}


def _write_object(live: Any, state: dict[str, Any]) -> None:
    slots = _slots(type(live))
    if hasattr(live, "__dict__"):
        _write_dict(vars(live), {name: value for name, value in state.items() if name not in slots})
    for name in slots:
        if name in state:
            object.__setattr__(live, name, state[name])
        elif hasattr(live, name):
            object.__delattr__(live, name)


@_once_for_each_class
def _slots(cls: type) -> frozenset[str]:
    """Return the names of the attributes that objects of a class keep in slots, not in a `__dict__`."""
    return frozenset(
        name for base in cls.__mro__ for name, value in vars(base).items() if type(value) is types.MemberDescriptorType
    )


def _inside_module(state: dict[str, Any]) -> Iterable[Any]:
    yield Parameters(state.get("_parameters", {}), state.get("_parameters", {}))
    yield from (value for name, value in state.items() if name not in _PLUMBING and name != "_parameters")


def _read_parameters(part: Parameters) -> dict[str, Any]:
    return {name: value for name, value in dict.items(part.live) if type(value) is nn.Parameter}


def _write_parameters(part: Parameters, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if type(dict.get(part.live, name)) is nn.Parameter:
            dict.__setitem__(part.live, name, value)


def _read_globals(part: Globals) -> dict[str, Any]:
    return {name: part.live[name] for name in part.names if name in part.live}


def _write_globals(part: Globals, state: dict[str, Any]) -> None:
    for name in part.names:
        if name in state:
            part.live[name] = state[name]
        else:
            part.live.pop(name, None)


def _inside_function(state: tuple[Any, ...]) -> Iterable[Any]:
    function, closure, *others = state
    yield from closure
    yield from (each for each in others if each)
    if is_own(function):
        names = _names_in(function.__code__)
        yield Globals(function, function.__globals__, names)
        for name in names:
            module = function.__globals__.get(name)
            if type(module) is types.ModuleType and is_own(module):
                yield Globals((function, module), vars(module), names)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in the code of a function and of its inner functions."""
    inner = [name for each in code.co_consts if type(each) is types.CodeType for name in _names_in(each)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _read_class(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if not (name.startswith("__") and name.endswith("__"))}


def _write_class(cls: type, state: dict[str, Any]) -> None:
    now = _read_class(cls)
    for name in now.keys() - state.keys():
        type.__delattr__(cls, name)
    for name, value in state.items():
        if now.get(name, now) is not value:
            type.__setattr__(cls, name, value)


def _inside_class(state: dict[str, Any]) -> Iterable[Any]:
    return [each for each in state.values() if type(each) in _CONTAINERS or type(each) is types.FunctionType]


def _read_cell(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # the cell is empty
        return []


def _write_cell(cell: types.CellType, state: list[Any]) -> None:
    if state:
        cell.cell_contents = state[0]
    else:
        del cell.cell_contents


def _write_tensor(live: torch.Tensor, state: torch.Tensor) -> None:
    """Give a tensor its former memory back, after `tensor.data` was set."""
    live.data = state


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _write_array(live: Any, state: Any) -> None:
    if live.flags.writeable:
        live[...] = state


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_is_equal(value, other[name]) for name, value in one.items())
    return np.array_equal(one, other)


def _both(one: StateKind, other: StateKind) -> StateKind:
    kinds = one, other

    def write(live: Any, state: tuple[Any, Any]) -> None:
        for kind, part in zip(kinds, state, strict=True):
            assert kind.write is not None, "containers and objects change"
            kind.write(live, part)

    def inside(state: tuple[Any, Any]) -> Iterable[Any]:
        return [each for kind, part in zip(kinds, state, strict=True) if kind.inside for each in kind.inside(part)]

    def is_same_pair(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
        return one.is_same(a[0], b[0]) and other.is_same(a[1], b[1])

    return StateKind(lambda live: (one.read(live), other.read(live)), write, inside, is_same_pair)


CLASS = StateKind(_read_class, _write_class, _inside_class)
_TENSOR = StateKind(alias_of, _write_tensor, is_same=_is_same_memory)
_OBJECT = StateKind(_read_object, _write_object, dict.values)
_CONTAINERS: dict[type, StateKind] = {
    dict: StateKind(_items, _write_dict, dict.values),
    list: StateKind(lambda live: list.__getitem__(live, slice(None)), _write_list, iter),
    collections.deque: StateKind(lambda live: list(collections.deque.__iter__(live)), _write_deque, iter),
    set: StateKind(lambda live: list(set.__iter__(live)), _write_set),
}
_FUNCTION = StateKind(
    lambda live: (live, live.__closure__ or (), live.__defaults__, live.__kwdefaults__, live.__dict__),
    None,
    _inside_function,
)
_KINDS: dict[type, StateKind] = {
    nn.Module: StateKind(
        lambda live: dict(vars(live)), lambda live, state: _write_dict(vars(live), state), _inside_module
    ),
    Parameters: StateKind(_read_parameters, _write_parameters),
    Globals: StateKind(_read_globals, _write_globals, dict.values),
    tuple: StateKind(lambda live: live, None, tuple.__iter__),
    **_CONTAINERS,
    types.FunctionType: _FUNCTION,
    types.CellType: StateKind(_read_cell, _write_cell, iter),
    types.MethodType: StateKind(lambda live: (live.__self__, live.__func__), None, iter),
    functools.partial: StateKind(lambda live: (live.func, live.args, live.keywords), None, iter),
    torch.Generator: StateKind(
        lambda live: live.get_state(), lambda live, state: live.set_state(state), is_same=torch.equal
    ),
    random.Random: StateKind(
        lambda live: live.getstate(), lambda live, state: live.setstate(state), is_same=lambda a, b: a == b
    ),
    np.random.Generator: StateKind(
        lambda live: live.bit_generator.state,
        lambda live, state: setattr(live.bit_generator, "state", state),
        is_same=_is_equal,
    ),
    np.random.RandomState: StateKind(
        lambda live: live.get_state(legacy=False), lambda live, state: live.set_state(state), is_same=_is_equal
    ),
    np.ndarray: StateKind(lambda live: live.copy(), _write_array, is_same=lambda a, b: a.tobytes() == b.tobytes()),
}
