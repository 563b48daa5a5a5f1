"""Restores, for a recompute pass, the state that the region's forward ran in.

The state is autocast, random generators, attention back ends and the default device. The native core notes it when a
forward starts (native/tape/ambient.h). On a GPU the pass runs on autograd's own thread, which has none of this state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from memplug.device.device import Device
from memplug.tokenwise.engine.core import core
from memplug.torch_private import (
    peek_interpreter_stack,
    temporarily_clear_interpreter_stack,
    vmapmode_decrement_nesting,
    vmapmode_increment_nesting,
)


@contextlib.contextmanager
def restored(
    device: Device,
    surroundings: Sequence[Callable[[], Any]],
    cpu_rng: torch.Tensor | None,
    device_rng: torch.Tensor | None,
    autocast: Sequence[tuple[str, bool, torch.dtype]],
    attention: Mapping[str, bool],
    default_device: torch.device | None,
) -> Iterator[None]:
    """Enter the state of the forward, to run a module or a unit again.

    Inside, as in the forward, compiled functions of the model run uncompiled, since compiled code shows no operators.
    Only units run compiled.

    Args:
        device: the device that trains.
        surroundings: functions that return a context; each context restores a state of the framework on which random
            operators depend.
        cpu_rng: state of the CPU's generator; None if nothing draws from it.
        device_rng: state of the device's generator; None if nothing draws from it, or the device is the CPU.
        autocast: (device type, whether autocast is on, dtype) for each device type. As in the forward, autocast runs
            without its cache. With a cache, a forward would cast a weight once for two regions, but the recompute pass
            of each region would cast it again.
        attention: whether each back end is enabled, by its name in `torch.backends.cuda`.
        default_device: device of factory functions; None: none was set.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(core().AsWritten())
        for kind, enabled, dtype in autocast:
            if enabled or torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) != dtype:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
        if default_device is not None:
            stack.enter_context(default_device)
        for name, on in attention.items():
            turn = getattr(torch.backends.cuda, f"enable_{name}_sdp")
            if (now := getattr(torch.backends.cuda, f"{name}_sdp_enabled")()) != on:
                turn(on)
                stack.callback(turn, now)
        if cpu_rng is not None:
            stack.callback(torch.set_rng_state, torch.get_rng_state())
            torch.set_rng_state(cpu_rng)
        if device_rng is not None:
            stack.callback(device.set_rng_state, device.get_rng_state())
            device.set_rng_state(device_rng)
        for again in surroundings:
            stack.enter_context(again())
        yield


def is_transformed() -> bool:
    """Return whether this thread is inside of a function transform, without making torch create its transform stack."""
    return core().has_transform_stack() and peek_interpreter_stack() is not None


def no_transforms() -> AbstractContextManager[None]:
    """Return a context without the function transforms around backward, such as the vmap of batched gradients."""
    batched = vmapmode_increment_nesting() - 1  # the vmap of `torch.autograd.grad` is not on the transform stack
    vmapmode_decrement_nesting()
    if not batched and not is_transformed():
        return contextlib.nullcontext()
    return _outside_transforms(batched)


@contextlib.contextmanager
def _outside_transforms(batched: int) -> Iterator[None]:
    for _ in range(batched):
        vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(batched):
            vmapmode_increment_nesting()
