"""Withholds tensors that a region puts into a key-value cache, and makes them again once the program uses them.

Until then they take no memory. memplug can make them again as long as their autograd graph exists.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memplug.errors import ConflictError
from memplug.hooks.derived import once_for_each_class
from memplug.tokenwise.engine.core import core

WITHHELD = "_memplug_withheld"


@dataclass
class Uses:
    """Records how the forwards of a model use caches.

    Attributes:
        again: True once the program has used a withheld tensor; from then on regions leave their tensors in the caches.
    """

    again: bool = False


class Withheld:
    """The tensors that memplug withholds from one cache, or one layer of a cache, after one run of a region.

    Args:
        region: name of the region that ran.
        uses: how the model's forwards use caches.
        before: the state of the layer before the run; None for a cache itself, or if the layer already had tensors.

    Attributes:
        look: a copy of the layer with meta tensors in place of the withheld ones.
        state: the layer's attributes that had withheld tensors, by name, now with meta tensors.
    """

    def __init__(self, region: str, uses: Uses, before: dict[str, Any] | None = None):
        self._region, self._uses, self.before = region, uses, before
        self.look: Any = None
        self.state: dict[str, Any] = {}
        self._places: list[tuple[torch.Tensor, Any]] = []
        self._made: dict[int, torch.Tensor] | None = None

    def __bool__(self) -> bool:
        """Return whether any tensor is withheld."""
        return bool(self._places)

    def place_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Withhold a tensor; return a meta tensor that stands for it."""
        place = torch.empty_like(tensor, device="meta", requires_grad=False)
        self._places.append((place, core().WithheldTensor(tensor)))
        return place

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a meta tensor that stands for a withheld one."""
        return any(place is tensor for place, _ in self._places)

    def filled(self, value: Any) -> Any:
        """Make the withheld tensors again; return `value` with them in place of the meta tensors.

        Args:
            value: a part of the state, with meta tensors.

        Raises:
            ConflictError: the tensors cannot be made again.
        """
        self._uses.again = True
        if self._made is None:
            made = core().made_again([withheld for _, withheld in self._places])
            if made is None:
                raise self.used_again()
            self._made = {id(place): tensor for (place, _), tensor in zip(self._places, made, strict=True)}
        return mapped(value, lambda tensor: self._made.get(id(tensor), tensor))

    def used_again(self) -> ConflictError:
        """Return the error for using a cache whose tensors cannot be made again."""
        return ConflictError(
            f"a key-value cache that region {self._region} was given in a forward with gradients is used again, "
            "and the keys and values of that forward are gone with its graph",
            "Run the step again: from now on regions leave them in their caches. Or use the cache before backward "
            "runs, or with `retain_graph=True`, or fill it under `torch.no_grad()`.",
            code="MP026",
        )


def withhold(layer: Any, state: dict[str, Any], withheld: Withheld) -> None:
    """Remove withheld tensors from a layer; their first use makes them again.

    Args:
        layer: the cache's layer.
        state: the layer's new state, with meta tensors in place of the withheld ones.
        withheld: the withheld tensors.
    """
    withheld.look = object.__new__(type(layer))
    vars(withheld.look).update(state)
    withheld.state = {name: value for name, value in state.items() if any(map(withheld.has, tensors_in(value)))}
    vars(layer).clear()
    vars(layer).update({name: value for name, value in state.items() if name not in withheld.state})
    vars(layer)[WITHHELD] = withheld
    layer.__class__ = _withholding(type(layer))


def give_back(layer: Any) -> None:
    """Make a layer's withheld tensors again, and restore the layer's own class."""
    withheld = vars(layer)[WITHHELD]
    state = {name: withheld.filled(value) for name, value in withheld.state.items()}
    del vars(layer)[WITHHELD]
    vars(layer).update({name: value for name, value in state.items() if name not in vars(layer)})
    layer.__class__ = type(withheld.look)


@once_for_each_class
def _withholding(own: type) -> type:
    """Return the subclass of `own` that a cache's layer has while its tensors are withheld.

    Its `get_...` methods (such as the one for the length) work without the tensors. Other uses make them again.
    """

    def ask(self: Any, name: str) -> Any:
        if WITHHELD not in vars(self) or name not in vars(self)[WITHHELD].state:
            raise AttributeError(f"{own.__name__!r} object has no attribute {name!r}")
        give_back(self)
        return vars(self)[name]

    def reset(self: Any) -> None:
        before = vars(self)[WITHHELD].before
        if before:
            self.__class__ = own
            vars(self).clear()
            vars(self).update(copied(before))
        else:
            give_back(self)
        self.reset()

    def shallow(self: Any) -> Any:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def reduced(self: Any, protocol: Any) -> Any:  # deep copies and pickles need the tensors themselves
        give_back(self)
        return self.__reduce_ex__(protocol)

    looks = {name: _looking(name) for name in dir(own) if name.startswith("get_")}
    members = {**looks, "__getattr__": ask, "reset": reset, "__copy__": shallow, "__reduce_ex__": reduced}
    members |= {"_layer_type": None, "__module__": own.__module__}
    return type(own.__name__, (own,), members)


def _looking(name: str) -> Callable[..., Any]:
    """Return a method that calls the layer's own method on `Withheld.look`, a copy with meta tensors."""

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(vars(self)[WITHHELD].look, name)(*args, **kwargs)

    return look


def copied(value: Any, layers: type = list) -> Any:
    """Return a copy of a cache's state: changing the copy does not change the original, but both share the tensors.

    Args:
        value: the state, or a part of it.
        layers: the type for the copy of a cache's `layers` list; the layers themselves are not copied.
    """
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    if type(value) is list:
        return [copied(each) for each in value]
    if isinstance(value, type) or not hasattr(value, "reset"):  # neither a cache nor a layer of one
        return value
    made = copy.copy(value)
    for name, each in vars(made).items():
        vars(made)[name] = layers(each) if name == "layers" else copied(each, layers)
    return made


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a layer's state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the value with each tensor in it replaced by `change(tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: mapped(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(mapped(each, change) for each in value)
    return value


def without_memory(value: Any, kept: set[int], withheld: Withheld) -> Any:
    """Return the value with all tensors withheld, except those whose `id` is in `kept`."""
    return mapped(value, lambda tensor: tensor if id(tensor) in kept else withheld.place_of(tensor))
