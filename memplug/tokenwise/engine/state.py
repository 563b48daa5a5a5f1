"""The Python state that a region's forward may change: attributes, buffers, containers, counters, caches, closures.

An opaque region runs its module again in backward. This recompute pass must find every name as the forward found it,
and leave no trace. Otherwise a layer that rebinds a buffer to a new tensor would rebind it twice, and a flag that the
script has set since the forward, as `model.eval()` does, would change the pass. Values that the forward writes in place
are memory, not names: see `memplug.tokenwise.engine.buffers`.

memplug follows objects (reads their state, and puts it back later), starting at the function that the region calls and
the objects among its arguments. It follows modules, with their attributes and classes; containers; objects of the
model's own classes; functions, with variables of closures and globals that they name; generators of random numbers; and
NumPy arrays. It does not follow objects of frameworks. An iterator, or an object of an extension, may change without
any sign: a region that has one keeps all tensors that it saves on the device, and never runs again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from memplug.tokenwise.engine.buffers import alias_of
from memplug.tokenwise.engine.calls import StateCalls
from memplug.tokenwise.engine.core import paused
from memplug.tokenwise.engine.state_kinds import CLASS, ObjectPart, StateKind, UnknownObject, is_own, is_plain, kind_of

MOST_OBJECTS = 20_000
_GENERATORS = (random._inst, np.random.mtrand._rand)  # type: ignore[attr-defined]  # used by `random`, `numpy.random`


class CallState(StateCalls):
    """The Python state before a call.

    Attributes:
        unknown: why the state cannot be put back; "" if it can be.
    """

    def __init__(self, unknown: str = "") -> None:
        self.unknown = unknown
        self._found: list[tuple[Any, StateKind, Any]] = []

    @classmethod
    def of(
        cls, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], for_backward: bool = True
    ) -> CallState:
        """Return the state before `call(*args, **kwargs)`.

        Args:
            call: the function that is about to run.
            args: its arguments.
            kwargs: its keyword arguments.
            for_backward: whether the state is for a recompute pass. If so, it has tensors without their graphs: a graph
                would keep earlier forwards alive, even those that no backward follows.
        """
        state = cls()
        with paused():
            state._follow([call, *_GENERATORS, *_objects_in((args, kwargs))])
        if state.unknown:
            state._found = []
        elif for_backward:
            state._found = [
                (live, kind, _without_graphs(found) if kind.inside else found) for live, kind, found in state._found
            ]
        return state

    def _follow(self, todo: list[Any]) -> None:
        seen: dict[tuple[type, int], Any] = {}  # keeps objects alive, so that no other object gets their id
        while todo:
            live = todo.pop()
            kind = CLASS if isinstance(live, type) and is_own(live) else kind_of(type(live))
            if kind is None or (isinstance(live, torch.Tensor) and (live.grad_fn is not None or not is_plain(live))):
                continue
            if isinstance(kind, UnknownObject):
                self.unknown = f"it holds a {kind.name}, whose state cannot be put back"
                return
            key = type(live), id(live.owner if isinstance(live, ObjectPart) else live)
            if key in seen:
                continue
            seen[key] = live
            todo.extend(self._add(live, kind))
            todo.extend((live if isinstance(live, type) else type(live)).__mro__)
            if len(seen) > MOST_OBJECTS:
                self.unknown = f"it holds more than {MOST_OBJECTS} objects, too many to put back"
                return

    def _add(self, live: Any, kind: StateKind) -> Iterable[Any]:
        state = kind.read(live)
        if kind.write is not None:
            self._found.append((live, kind, state))
        return kind.inside(state) if kind.inside is not None else ()

    def put_back(self) -> bool:
        """Put all state back as it was before the call.

        Returns:
            Whether any state had changed since.
        """
        changed = False
        with paused():
            for live, kind, state in self._found:
                if not kind.is_same(kind.read(live), state):
                    changed = True
                    assert kind.write is not None, "only such are found"
                    kind.write(live, state)
        return changed

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Enter a context in which all state is as it was before the call; afterwards it has its later values again."""
        now = CallState()
        with paused():
            now._found = [(live, kind, kind.read(live)) for live, kind, _ in self._found]
        try:
            self.put_back()
            yield
        finally:
            now.put_back()


def _objects_in(value: Any) -> Iterator[Any]:
    """Yield the objects among arguments, except for tensors and containers.

    The region keeps or swaps the tensors, and a recompute pass gets new containers.
    """
    if type(value) in (tuple, list):
        for each in value:
            yield from _objects_in(each)
    elif type(value) is dict:
        yield from _objects_in(list(value.values()))
    elif not isinstance(value, torch.Tensor):
        yield value


def _without_graphs(state: Any) -> Any:
    if type(state) is dict:
        return {name: _without_graph(value) for name, value in state.items()}
    if type(state) is tuple:
        return tuple(_without_graphs(each) if type(each) is dict else _without_graph(each) for each in state)
    return list(map(_without_graph, state)) if type(state) is list else state


def _without_graph(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_without_graph, value)) if any(isinstance(each, torch.Tensor) for each in value) else value
    if type(value) is not torch.Tensor or not is_plain(value) or value.grad_fn is None:
        return value
    return alias_of(value).requires_grad_()
