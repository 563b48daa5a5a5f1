"""Key-value caches, and states of other layers, that a region is given: in training every run of it has a copy.

A cache is state: a layer reads what is in its slot and adds to it. A region may run again, and must find the cache as
its forward did; and keys and values that lasted until the model's output goes would take the memory that the region
released. So each run has a copy of the cache as the forward found it. Afterwards the cache knows how many tokens it was
given; tensors that the forward made are replaced by such without memory, and using them is an error.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memplug.errors import ConflictError
from memplug.tokenwise.regions.core import paused

_WITHHELD = "_memplug_withheld"


def is_cache(value: Any) -> bool:
    """Returns whether an argument is a cache."""
    has_state = hasattr(value, "get_seq_length") and hasattr(value, "__dict__")
    return has_state and not isinstance(value, (nn.Module, torch.Tensor, type))


class Found:
    """A cache as one forward of a region found it; stands for the cache among that forward's arguments.

    Args:
        cache: the model's.
        region: the region's name.

    Raises:
        ConflictError: the region was given this cache before, and what it put there itself, in no layer, is gone.
    """

    def __init__(self, cache: Any, region: str):
        if region in vars(cache).get(_WITHHELD, ()):
            raise _used_again(region)
        self._cache, self._region = cache, region
        self._is_first = True

    def enter(self) -> Any:
        """Returns the copy for a run that begins."""
        return _copied(self._cache, _Layers)

    def leave(self, used: Any) -> None:
        """Give the cache the state of the copy that a forward used, and keep what the forward found."""
        if self._is_first:
            self._is_first = False
            before = _copied(self._cache, list)
            self._put(self._cache, used, before)
            self._cache = before

    def _put(self, cache: Any, used: Any, before: Any) -> None:
        kept = {id(tensor) for tensor in _tensors(vars(before))}
        for name, value in list(vars(used).items()):
            if isinstance(value, _Layers):
                value.put_into(cache.layers, self._region)
                before.layers = [value.found.get(at, layer) for at, layer in enumerate(before.layers)]
            elif is_cache(value) and is_cache(getattr(cache, name, None)):
                self._put(getattr(cache, name), value, getattr(before, name))
            elif name != _WITHHELD:
                vars(cache)[name] = _without_memory(value, kept)
                if any(id(tensor) not in kept for tensor in _tensors(value)):
                    vars(cache)[_WITHHELD] = {*vars(cache).get(_WITHHELD, ()), self._region}


def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a region's forward on a copy of each cache that was `Found`."""
    entered: list[tuple[Found, Any]] = []

    def own(value: Any) -> Any:
        if isinstance(value, Found):
            entered.append((value, value.enter()))
            return entered[-1][1]
        return value

    out = call(*map(own, args), **{name: own(value) for name, value in kwargs.items()})
    with paused():
        for found, used in entered:
            found.leave(used)
    return out


class _Layers(list):
    """A cache's layers, each of which is copied once a run asks for it.

    Attributes:
        found: by index, copies of those as the run found them.
    """

    def __init__(self, layers: list[Any]):
        super().__init__(layers)
        self.found: dict[int, Any] = {}
        self._given = tuple(layers)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        index = range(len(self))[operator.index(at)]
        layer = super().__getitem__(index)
        if index < len(self._given) and layer is self._given[index]:
            self.found[index], layer = _copied(layer), _copied(layer)
            super().__setitem__(index, layer)
        return layer

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def put_into(self, layers: list[Any], region: str) -> None:
        """Give the cache's own layers the state of those that a run asked for, made or put in their place."""
        for at, used in enumerate(super().__iter__()):
            if at < len(self._given) and used is self._given[at]:
                continue
            if at >= len(layers):
                layers.append(used)
            elif type(layers[at]) is not type(used):
                layers[at] = used
            _put_layer(layers[at], used, self.found.get(at), region)


def _put_layer(layer: Any, used: Any, found: Any, region: str) -> None:
    before = vars(found) if found is not None else {}
    kept = {id(tensor) for tensor in _tensors(before)}
    withheld = any(id(tensor) not in kept for tensor in _tensors(vars(used)))
    state = {name: _without_memory(value, kept) for name, value in vars(used).items()}
    vars(layer).clear()
    vars(layer).update(state)
    if withheld:
        vars(layer)[_WITHHELD] = (region, None if kept else before)
        layer.__class__ = _withheld(type(layer))


@functools.cache
def _withheld(own: type) -> type:
    """Returns a subclass of a cache's layer that knows its length and refuses to be used until it is reset."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _used_again(vars(self)[_WITHHELD][0])

    def reset(self: Any) -> None:
        region, before = vars(self)[_WITHHELD]
        if not before:
            raise _used_again(region)
        self.__class__ = own
        vars(self).clear()
        vars(self).update(_copied(before))
        self.reset()

    uses = [name for name in dir(own) if name.startswith("update") or name in ("crop", "offload", "reorder_cache")]
    members = {**dict.fromkeys(uses, refuse), "reset": reset, "_layer_type": None, "__module__": own.__module__}
    return type(own.__name__, (own,), members)


def _used_again(region: str) -> ConflictError:
    return ConflictError(
        f"a key-value cache that region {region} was given in a forward with gradients is used again, and memplug has "
        "not kept the keys and values of that forward",
        "Give each forward with gradients a cache of its own, filled under `torch.no_grad()` if at all, and use it for "
        'no other forward; or leave these layers out of "tokenwise.regions".',
    )


def _copied(value: Any, layers: type = list) -> Any:
    """Returns a copy with the same tensors that can change without the original.

    Args:
        layers: made of the layers of a cache, which are not copied themselves.
    """
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    if type(value) is list:
        return [_copied(each) for each in value]
    if isinstance(value, type) or not hasattr(value, "reset"):  # neither a cache nor a layer of one
        return value
    made = copy.copy(value)
    for name, each in vars(made).items():
        vars(made)[name] = layers(each) if name == "layers" else _copied(each, layers)
    return made


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _without_memory(value: Any, kept: set[int]) -> Any:
    """Returns the value with tensors without memory for all but some, given by their `id`."""
    if isinstance(value, torch.Tensor):
        return value if id(value) in kept else torch.empty_like(value, device="meta", requires_grad=False)
    if type(value) is dict:
        return {key: _without_memory(each, kept) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_without_memory(each, kept) for each in value)
    return value
