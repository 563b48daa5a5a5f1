"""Gives each run of a region in training a copy of the caches (key-value or recurrent) among the region's arguments.

A layer reads its slot of the cache and appends to it. A region that runs again for backward must see the cache in its
state before that append. So each run gets a copy of the cache in that state.

The model's output keeps its caches alive. If a cache held the keys and values of the forward, the region could not
release their memory. So after the forward the cache knows its number of tokens, but memplug withholds the tensors. If
the program does use them, as a recurrence over segments does, memplug makes them again, connected to the autograd
graph. From then on, regions leave their tensors in the caches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memplug.hooks.withheld import (
    WITHHELD,
    Uses,
    Withheld,
    copied,
    give_back,
    mapped,
    tensors_in,
    withhold,
    without_memory,
)
from memplug.tokenwise.engine.buffers import alias_of
from memplug.tokenwise.engine.core import paused


def is_cache(value: Any) -> bool:
    """Return whether an argument is a cache: an object with `get_seq_length`."""
    if isinstance(value, (torch.Tensor, nn.Module, type)):
        return False
    return hasattr(value, "get_seq_length") and hasattr(value, "__dict__")


class FoundCache:
    """Placeholder for a cache in the arguments of one forward of a region; keeps the cache's state before that forward.

    Args:
        cache: the model's cache.
        region: the region's name.
        uses: how the model's forwards use caches.

    Raises:
        ConflictError: an earlier forward of the region put tensors into the cache itself (not into one of its layers),
            and memplug cannot make them again.
    """

    def __init__(self, cache: Any, region: str, uses: Uses):
        withheld = vars(cache).get(WITHHELD, {})
        if region in withheld:
            for name, value in withheld[region].filled(vars(cache)).items():
                vars(cache)[name] = value
            vars(cache)[WITHHELD] = {name: each for name, each in withheld.items() if name != region}
        self._cache, self._region, self._uses = cache, region, uses
        self._is_first = True

    def enter(self) -> Any:
        """Return a copy of the cache in its state before the forward; called when a run begins."""
        return copied(self._cache, _CacheLayers)

    def leave(self, used: Any) -> None:
        """Update the cache from the copy that a run used, and keep the state before the forward for later runs.

        Only the first run updates the cache.
        """
        if self._is_first:
            self._is_first = False
            before = copied(self._cache, list)
            self._put(self._cache, used, before)
            self._cache = before

    def _put(self, cache: Any, used: Any, before: Any) -> None:
        kept = {id(tensor) for tensor in tensors_in(vars(before))}
        withheld = Withheld(self._region, self._uses)
        for name, value in list(vars(used).items()):
            if isinstance(value, _CacheLayers):
                value.put_into(cache.layers, self._region, self._uses)
                # drop the layers that the run did not use: another region may put tensors into them, whose autograd
                # graph references this object
                before.layers = [value.found.get(at) for at in range(len(before.layers))]
            elif is_cache(value) and is_cache(getattr(cache, name, None)):
                self._put(getattr(cache, name), value, getattr(before, name))
            elif name != WITHHELD:
                vars(cache)[name] = value if self._uses.again else without_memory(value, kept, withheld)
        if withheld:
            vars(cache)[WITHHELD] = {**vars(cache).get(WITHHELD, {}), self._region: withheld}


def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a region's forward with a copy of the cache in place of each `FoundCache` among its arguments."""
    entered: list[tuple[FoundCache, Any]] = []

    def own(value: Any) -> Any:
        if isinstance(value, FoundCache):
            entered.append((value, value.enter()))
            return entered[-1][1]
        return value

    out = call(*map(own, args), **{name: own(value) for name, value in kwargs.items()})
    with paused():
        for found, used in entered:
            found.leave(used)
    return out


class _CacheLayers(list):
    """List of a cache's layers that copies each layer on first access.

    Attributes:
        found: by index, a second copy of each accessed layer, which stays in the state before the run.
        leaves: the `id` of each tensor of the accessed layers that does not require a gradient.
    """

    def __init__(self, layers: list[Any]):
        super().__init__(layers)
        self.found: dict[int, Any] = {}
        self.leaves: set[int] = set()
        self._given = tuple(layers)

    def __getitem__(self, at: Any) -> Any:
        """Return the copy of the layer at an index, or the copies of the layers in a slice."""
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        index = range(len(self))[operator.index(at)]
        layer = super().__getitem__(index)
        if index < len(self._given) and layer is self._given[index]:
            self.leaves.update(id(tensor) for tensor in tensors_in(vars(layer)) if not tensor.requires_grad)
            self.found[index], layer = copied(layer), copied(layer)
            super().__setitem__(index, layer)
        return layer

    def __iter__(self) -> Iterator[Any]:
        """Iterate over copies of the layers."""
        return (self[index] for index in range(len(self)))

    def put_into(self, layers: list[Any], region: str, uses: Uses) -> None:
        """Update the cache's own `layers` from the layers that the run used, added or replaced."""
        for at, used in enumerate(super().__iter__()):
            # the run did not use the layer, or read only its length
            if (at < len(self._given) and used is self._given[at]) or WITHHELD in vars(used):
                continue
            found = self.found.get(at)
            if found is not None and WITHHELD in vars(found):
                give_back(found)
            if at >= len(layers):
                layers.append(used)
            elif WITHHELD in vars(layers[at]):
                give_back(layers[at])
            if type(layers[at]) is not type(used):
                layers[at] = used
            _put_layer(layers[at], used, found, region, uses)
        # a leaf that the run wrote to in place now has a graph, which references `found`: keep an alias without a graph
        for found in self.found.values():
            for name, value in vars(found).items():
                vars(found)[name] = mapped(value, lambda x: alias_of(x) if id(x) in self.leaves else x)


def _put_layer(layer: Any, used: Any, found: Any, region: str, uses: Uses) -> None:
    before = vars(found) if found is not None else {}
    kept = {id(tensor) for tensor in tensors_in(before)}
    withheld = Withheld(region, uses, None if kept else before)
    state = dict(vars(used))
    if not uses.again:
        state = {name: without_memory(value, kept, withheld) for name, value in state.items()}
    if withheld:
        withhold(layer, state, withheld)
    else:
        vars(layer).clear()
        vars(layer).update(state)
