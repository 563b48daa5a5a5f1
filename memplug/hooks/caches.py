"""Key-value caches, and states of other layers, that a region is given: in training every run of it has a copy.

A cache is state: a layer reads what is in its slot and adds to it. A region may run again, and must find the cache as
its forward did; and keys and values that lasted until the model's output goes would take the memory that the region
released. So each run has a copy of the cache as the forward found it. Afterwards the cache knows how many tokens it was
given, and tensors that the forward made are withheld: they are made again, with their place in the graph, once they are
used, as a recurrence over segments does. From then on the region leaves them where they are.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplug.errors import ConflictError
from memplug.tokenwise.regions.core import core, paused

_WITHHELD = "_memplug_withheld"


def is_cache(value: Any) -> bool:
    """Returns whether an argument is a cache."""
    has_state = hasattr(value, "get_seq_length") and hasattr(value, "__dict__")
    return has_state and not isinstance(value, (nn.Module, torch.Tensor, type))


@dataclass
class Uses:
    """What the forwards of a model do with caches.

    Attributes:
        again: tensors that a region put into one were used in another forward: regions leave theirs where they are.
    """

    again: bool = False


class _Withheld:
    """Tensors that one run has put into a cache, or a layer of one, and that are not kept.

    Args:
        region: of the run, its name.
        uses: the model's.
        before: the state of the layer as the run found it; None: it is no layer, or that has tensors.

    Attributes:
        look: the layer, with tensors without memory.
        state: of it, by name, all in which something is withheld.
    """

    def __init__(self, region: str, uses: Uses, before: dict[str, Any] | None = None):
        self._region, self._uses, self.before = region, uses, before
        self.look: Any = None
        self.state: dict[str, Any] = {}
        self._places: list[tuple[torch.Tensor, Any]] = []
        self._made: dict[int, torch.Tensor] | None = None

    def __bool__(self) -> bool:
        return bool(self._places)

    def place_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor without memory for one that is withheld."""
        known = core()
        place = torch.empty_like(tensor, device="meta", requires_grad=False)
        self._places.append((place, known.Withheld(tensor) if known is not None else None))
        return place

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stands for one that is withheld."""
        return any(place is tensor for place, _ in self._places)

    def filled(self, value: Any) -> Any:
        """Returns a value with the tensors that were withheld.

        Raises:
            ConflictError: they cannot be made again.
        """
        self._uses.again = True
        if self._made is None:
            known = core()
            made = known.made_again([withheld for _, withheld in self._places]) if known is not None else None
            if made is None:
                raise self.used_again()
            self._made = {id(place): tensor for (place, _), tensor in zip(self._places, made, strict=True)}
        return _mapped(value, lambda tensor: self._made.get(id(tensor), tensor))

    def used_again(self) -> ConflictError:
        """Returns the error of a use that cannot be."""
        return ConflictError(
            f"a key-value cache that region {self._region} was given in a forward with gradients is used again, "
            "and the keys and values of that forward are gone with its graph",
            "Run the step again: from now on regions leave them in their caches. Or use the cache before backward "
            "runs, or with `retain_graph=True`, or fill it under `torch.no_grad()`.",
        )


class Found:
    """A cache as one forward of a region found it; stands for the cache among that forward's arguments.

    Args:
        cache: the model's.
        region: the region's name.
        uses: the model's.

    Raises:
        ConflictError: the region was given this cache before, and what it put there itself, in no layer, is gone.
    """

    def __init__(self, cache: Any, region: str, uses: Uses):
        withheld = vars(cache).get(_WITHHELD, {})
        if region in withheld:
            for name, value in withheld[region].filled(vars(cache)).items():
                vars(cache)[name] = value
            vars(cache)[_WITHHELD] = {name: each for name, each in withheld.items() if name != region}
        self._cache, self._region, self._uses = cache, region, uses
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
        withheld = _Withheld(self._region, self._uses)
        for name, value in list(vars(used).items()):
            if isinstance(value, _Layers):
                value.put_into(cache.layers, self._region, self._uses)
                # none of the others: what they get later may lead back here, through its graph
                before.layers = [value.found.get(at) for at in range(len(before.layers))]
            elif is_cache(value) and is_cache(getattr(cache, name, None)):
                self._put(getattr(cache, name), value, getattr(before, name))
            elif name != _WITHHELD:
                vars(cache)[name] = value if self._uses.again else _without_memory(value, kept, withheld)
        if withheld:
            vars(cache)[_WITHHELD] = {**vars(cache).get(_WITHHELD, {}), self._region: withheld}


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

    def put_into(self, layers: list[Any], region: str, uses: Uses) -> None:
        """Give the cache's own layers the state of those that a run asked for, made or put in their place."""
        for at, used in enumerate(super().__iter__()):
            if (at < len(self._given) and used is self._given[at]) or _WITHHELD in vars(used):  # or looked at
                continue
            found = self.found.get(at)
            if found is not None and _WITHHELD in vars(found):
                _give_back(found)
            if at >= len(layers):
                layers.append(used)
            elif _WITHHELD in vars(layers[at]):
                _give_back(layers[at])
            if type(layers[at]) is not type(used):
                layers[at] = used
            _put_layer(layers[at], used, found, region, uses)


def _put_layer(layer: Any, used: Any, found: Any, region: str, uses: Uses) -> None:
    before = vars(found) if found is not None else {}
    kept = {id(tensor) for tensor in _tensors(before)}
    withheld = _Withheld(region, uses, None if kept else before)
    state = dict(vars(used))
    if not uses.again:
        state = {name: _without_memory(value, kept, withheld) for name, value in state.items()}
    if withheld:
        _withhold(layer, state, withheld)
    else:
        vars(layer).clear()
        vars(layer).update(state)


def _withhold(layer: Any, state: dict[str, Any], withheld: _Withheld) -> None:
    """Make a layer ask for what is withheld of its state."""
    withheld.look = object.__new__(type(layer))
    vars(withheld.look).update(state)
    withheld.state = {name: value for name, value in state.items() if any(map(withheld.has, _tensors(value)))}
    vars(layer).clear()
    vars(layer).update({name: value for name, value in state.items() if name not in withheld.state})
    vars(layer)[_WITHHELD] = withheld
    layer.__class__ = _withholding(type(layer))


def _give_back(layer: Any) -> None:
    """Give a layer what is withheld of its state, and its own class."""
    withheld = vars(layer)[_WITHHELD]
    state = {name: withheld.filled(value) for name, value in withheld.state.items()}
    del vars(layer)[_WITHHELD]
    vars(layer).update({name: value for name, value in state.items() if name not in vars(layer)})
    layer.__class__ = type(withheld.look)


@functools.cache
def _withholding(own: type) -> type:
    """Returns a subclass of a cache's layer that says its length, and asks for its tensors once one is used."""

    def ask(self: Any, name: str) -> Any:
        if _WITHHELD not in vars(self) or name not in vars(self)[_WITHHELD].state:
            raise AttributeError(f"{own.__name__!r} object has no attribute {name!r}")
        _give_back(self)
        return vars(self)[name]

    def reset(self: Any) -> None:
        before = vars(self)[_WITHHELD].before
        if before:
            self.__class__ = own
            vars(self).clear()
            vars(self).update(_copied(before))
        else:
            _give_back(self)
        self.reset()

    def copied(self: Any) -> Any:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def reduced(self: Any, protocol: Any) -> Any:  # a deep copy or a pickle has the tensors
        _give_back(self)
        return self.__reduce_ex__(protocol)

    looks = {name: _looking(name) for name in dir(own) if name.startswith("get_")}
    members = {**looks, "__getattr__": ask, "reset": reset, "__copy__": copied, "__reduce_ex__": reduced}
    members |= {"_layer_type": None, "__module__": own.__module__}
    return type(own.__name__, (own,), members)


def _looking(name: str) -> Callable[..., Any]:
    """Returns a method that answers as the layer would, by the sizes of its tensors."""

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(vars(self)[_WITHHELD].look, name)(*args, **kwargs)

    return look


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


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns the value with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_mapped(each, change) for each in value)
    return value


def _without_memory(value: Any, kept: set[int], withheld: _Withheld) -> Any:
    """Returns the value, with all tensors but some, given by their `id`, withheld."""
    return _mapped(value, lambda tensor: tensor if id(tensor) in kept else withheld.place_of(tensor))
