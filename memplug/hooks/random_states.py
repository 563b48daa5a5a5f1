"""Saves Megatron-Core's named random states, so that a region runs again with the states of its forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch


def kept(tracker: Any) -> Callable[[], AbstractContextManager[None]]:
    """Copy the states of a tracker; return a function that makes a context in which the tracker has these states.

    Args:
        tracker: Megatron-Core's `CudaRNGStatesTracker`, or Transformer Engine's.
    """
    states, name = _copied(tracker), getattr(tracker, "_current_state_name", None)

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        now, name_now = _copied(tracker), getattr(tracker, "_current_state_name", None)
        _put(tracker, states)
        _set_name(tracker, name)
        try:
            yield
        finally:
            _put(tracker, now)
            _set_name(tracker, name_now)

    return again


def _copied(tracker: Any) -> dict[str, Any]:
    """Return the tracker's states by name.

    With `--te-rng-tracker` the tracker holds generators; the result then has copies of the generators' states.
    """
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in tracker.get_states().items()
    }


def _put(tracker: Any, states: Mapping[str, Any]) -> None:
    there = tracker.get_states()
    for name, state in states.items():
        if isinstance(there.get(name), torch.Generator):
            there[name].set_state(state)
        else:
            there[name] = state
    tracker.set_states({name: there[name] for name in states})


def _set_name(tracker: Any, name: str | None) -> None:
    if name is not None:
        tracker._current_state_name = name
