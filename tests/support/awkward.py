"""Steps that fail or are unusual, one after another, and a count of what they leave behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memplug.tokenwise.engine.core import core
from tests.support.blocks import Block, Stack
from tests.support.failing import Failing, MayFail

LENGTHS = (6, 9, 6, 4)


class Stop(BaseException):
    """An error that no `except Exception` catches, like `KeyboardInterrupt`."""


class Fails(Block):
    """A block that raises in the middle of a forward or a recompute pass once `Failing` is armed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MayFail.apply(super().forward(x).sigmoid())


def awkward_steps(model: Stack) -> Iterator[None]:
    """Run one step after another, without end; each kind of step runs at each sequence length."""
    for number in itertools.count():
        step = STEPS[number % len(STEPS)]
        length = LENGTHS[number // len(STEPS) % len(LENGTHS)]
        step(model, torch.randn(2, length, 16))
        model.zero_grad()
        yield


def plain(model: Stack, x: torch.Tensor) -> None:
    model(x).backward()


def two_in_flight(model: Stack, x: torch.Tensor) -> None:
    first, second = model(x), model(x * 2)
    first.backward()
    second.backward()


def retained(model: Stack, x: torch.Tensor) -> None:
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()


def kept_after_a_retained_backward(model: Stack, x: torch.Tensor) -> None:
    model(x).backward(retain_graph=True)


def dropped(model: Stack, x: torch.Tensor) -> None:
    model(x)


def without_gradients(model: Stack, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)
    plain(model, x)


def raised_in_forward(model: Stack, x: torch.Tensor) -> None:
    Failing.arm(2, Stop)
    with contextlib.suppress(Stop):
        model(x).backward()
    assert Failing.calls == 2
    Failing.arm(0)


def raised_in_backward(model: Stack, x: torch.Tensor) -> None:
    loss = model(x)
    handle = model.layers[1].qkv.weight.register_hook(_stop)
    with contextlib.suppress(Stop):
        loss.backward()
    handle.remove()


def raised_in_a_recompute_pass(model: Stack, x: torch.Tensor) -> None:
    loss = model(x)
    Failing.arm(1, Stop)
    with contextlib.suppress(Stop):
        loss.backward()
    Failing.arm(0)


STEPS = (
    plain,
    raised_in_forward,
    two_in_flight,
    dropped,
    retained,
    raised_in_a_recompute_pass,
    without_gradients,
    kept_after_a_retained_backward,
    raised_in_backward,
    plain,
)


def _stop(gradient: torch.Tensor) -> None:
    raise Stop


def live_tensors() -> list[weakref.ref[torch.Tensor]]:
    """Return a weak reference to each tensor that Python holds now."""
    # by type: `isinstance` would ask a dead weak proxy for its class, which raises
    return [weakref.ref(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


def left_behind(executor: Any, earlier: Sequence[weakref.ref[torch.Tensor]] = ()) -> dict[str, int]:
    """Return counts that a step must not change, taken while no graph is alive.

    Args:
        executor: The regions' executor.
        earlier: Tensors to leave out of the count, since other code of the process may free them at any time.
    """
    gc.collect()
    executor.transfer.drain()
    flow, transfer = executor.flow, executor.transfer
    return {
        "tensors": len(live_tensors()) - sum(tensor() is not None for tensor in earlier),
        "forwards in flight": flow.live,
        "forwards that wait": flow.waiting,
        "host bytes": executor.pool.used_bytes,
        "bytes of host memory": executor.pool.capacity_bytes,
        "bytes fetched": transfer.prefetched_bytes,
        "bytes recomputed": flow.recomputed_bytes,
        "bytes of inputs": flow.input_bytes,
        "bytes on the device": transfer.resident_bytes,
        "tapes": flow.tapes,
        "pauses": core().paused(),
    }
