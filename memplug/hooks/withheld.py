"""Tensors that a region put into a key-value cache and that are not kept: they are made again once they are used, while
their graph is there.
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
    """What the forwards of a model do with caches.

    Attributes:
        again: tensors that a region put into one were used in another forward: regions leave theirs where they are.
    """

    again: bool = False


class Withheld:
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
        place = torch.empty_like(tensor, device="meta", requires_grad=False)
        self._places.append((place, core().WithheldTensor(tensor)))
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
            made = core().made_again([withheld for _, withheld in self._places])
            if made is None:
                raise self.used_again()
            self._made = {id(place): tensor for (place, _), tensor in zip(self._places, made, strict=True)}
        return mapped(value, lambda tensor: self._made.get(id(tensor), tensor))

    def used_again(self) -> ConflictError:
        """Returns the error of a use that cannot be."""
        return ConflictError(
            f"a key-value cache that region {self._region} was given in a forward with gradients is used again, "
            "and the keys and values of that forward are gone with its graph",
            "Run the step again: from now on regions leave them in their caches. Or use the cache before backward "
            "runs, or with `retain_graph=True`, or fill it under `torch.no_grad()`.",
            code="MP026",
        )


def withhold(layer: Any, state: dict[str, Any], withheld: Withheld) -> None:
    """Make a layer ask for what is withheld of its state."""
    withheld.look = object.__new__(type(layer))
    vars(withheld.look).update(state)
    withheld.state = {name: value for name, value in state.items() if any(map(withheld.has, tensors_in(value)))}
    vars(layer).clear()
    vars(layer).update({name: value for name, value in state.items() if name not in withheld.state})
    vars(layer)[WITHHELD] = withheld
    layer.__class__ = _withholding(type(layer))


def give_back(layer: Any) -> None:
    """Give a layer what is withheld of its state, and its own class."""
    withheld = vars(layer)[WITHHELD]
    state = {name: withheld.filled(value) for name, value in withheld.state.items()}
    del vars(layer)[WITHHELD]
    vars(layer).update({name: value for name, value in state.items() if name not in vars(layer)})
    layer.__class__ = type(withheld.look)


@once_for_each_class
def _withholding(own: type) -> type:
    """Returns a subclass of a cache's layer that says its length, and asks for its tensors once one is used."""

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

    def reduced(self: Any, protocol: Any) -> Any:  # a deep copy or a pickle has the tensors
        give_back(self)
        return self.__reduce_ex__(protocol)

    looks = {name: _looking(name) for name in dir(own) if name.startswith("get_")}
    members = {**looks, "__getattr__": ask, "reset": reset, "__copy__": shallow, "__reduce_ex__": reduced}
    members |= {"_layer_type": None, "__module__": own.__module__}
    return type(own.__name__, (own,), members)


def _looking(name: str) -> Callable[..., Any]:
    """Returns a method that answers as the layer would, by the sizes of its tensors."""

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(vars(self)[WITHHELD].look, name)(*args, **kwargs)

    return look


def copied(value: Any, layers: type = list) -> Any:
    """Returns a copy with the same tensors that can change without the original.

    Args:
        layers: made of the layers of a cache, which are not copied themselves.
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
    """Yields the tensors of a layer's state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns the value with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: mapped(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(mapped(each, change) for each in value)
    return value


def without_memory(value: Any, kept: set[int], withheld: Withheld) -> Any:
    """Returns the value, with all tensors but some, given by their `id`, withheld."""
    return mapped(value, lambda tensor: tensor if id(tensor) in kept else withheld.place_of(tensor))
