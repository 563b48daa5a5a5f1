"""Custom autograd functions that launch kernels past torch's dispatcher, such as those of Triton and of extensions.

memplug examines the first call of each function, and decides for good whether later calls are units. They are if the
first call did one of the following: it returned or saved memory that no operator filled, took a tensor's address, or
changed an argument without an operator. A call that returns only empty tensors, as for an expert that gets no tokens,
decides nothing; memplug then examines the next call.

memplug assumes that every call of a unit writes to the arguments that the first call changed, and to those whose memory
the first call returned. Kernels of rotary embeddings do so, and no version counter shows it. If a later call is the
first to change an argument, memplug detects this only if the argument's version advances, or the call returns the
argument. memplug detects a write to a parameter only if the parameter's version advances.

A function that returns integers or booleans, but got none, is taken to choose by values, as a router's kernel does. Its
outputs are captured like those of operators that choose (`memplug.tokenwise.engine.operators`).

With gradients disabled, a function is a unit only if it writes to its arguments. The outputs of all other functions are
then held until backward, like tensors that existed before the region.

To detect changes, memplug copies the arguments before the first call. The exception is an argument that another stream
makes (its node in autograd's graph names the stream): the function may be the first to wait for that stream, so a copy
could come too early. Such an argument is copied only if an operator of the region has read it. A write to an argument
without a copy is detected only if the argument's version advances, or the function returns the argument.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from memplug.tokenwise.engine.operators import CaptureKind
from memplug.tokenwise.engine.runs import RegionRunner
from memplug.tokenwise.engine.units import Unit

log = logging.getLogger("memplug")

EXCHANGES = {
    f"megatron.core.transformer.moe.fused_a2a.{name}"
    for name in ("FusedDispatch", "FusedCombine", "HybridEPDispatch", "HybridEPCombine")
}
"""Functions whose own kernels communicate with other ranks. memplug cannot see that, so they are listed here."""


_ATTENTION = re.compile("attn|attention", re.IGNORECASE)
_CHOICES = {torch.bool, torch.int16, torch.int32, torch.int64}  # no 8-bit types: quantized tensors use them


class HiddenFunctions:
    """The custom autograd functions of one session's regions."""

    def __init__(self, executor: RegionRunner):
        self._executor = executor
        self._units: dict[type, Unit] = {}
        self._visible: set[type] = set()
        self._writes_nothing: set[type] = set()  # these write to no argument if gradients are disabled
        self._found = self._told = 0
        self._is_on = True

    @property
    def units(self) -> list[str]:
        """Return the qualified names of the functions that are units, sorted."""
        return sorted(set(map(_name, self._units)))

    def found_some(self) -> bool:
        """Return whether `note_found` was called since the last call of this method."""
        before, self._told = self._told, self._found
        return self._told > before

    def apply(self, function: type, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call(*args, **kwargs)`, the `apply` of a function: as a unit, or to find out whether it is one."""
        executor = self._executor
        if not self._is_on:
            return call(*args, **kwargs)
        executor.core.meet_wrappers(*args)
        unit = self._units.get(function)
        if unit is not None:
            return unit.run(call, args, kwargs)
        gradients = torch.is_grad_enabled()
        if function in (self._visible if gradients else self._writes_nothing) or not executor.core.observes():
            return call(*args, **kwargs)
        if gradients and _name(function) in EXCHANGES:
            unit = self._add(function, communicates=True)
            return unit.run(call, args, kwargs)
        since = executor.core.Since(args)
        out = call(*args, **kwargs)
        returned = executor.core.tensors_in(out)
        if returned and not any(tensor.nbytes for tensor in returned):
            executor.core.is_undecided()
            return out
        found = executor.core.hidden_writes(since, out)
        if found is None or not (gradients or found[0]):
            (self._visible if gradients else self._writes_nothing).add(function)
            return out
        written = found[1]
        communicates, chooses = executor.core.communicates(since), _chooses(executor.core.tensors_in(args), returned)
        if executor.core.writes_elsewhere(since) or (chooses and written and not communicates):
            return out  # the function cannot run again by itself: it is no unit, and each call is examined
        unit = self._add(function, communicates, chooses)
        self.note_found()
        unit.note_writes(written)
        return out

    def note_found(self) -> None:
        """Note that from the next forward on, one more function does not make its region opaque."""
        self._found += 1

    def stop(self) -> None:
        """Stop examining calls."""
        self._is_on = False

    def _add(self, function: type, communicates: bool, chooses: bool = False) -> Unit:
        is_new = _name(function) not in self.units  # false for a class that is made anew for each call
        unit = self._units[function] = self._unit(function, communicates, chooses)
        if is_new and not (dist.is_initialized() and dist.get_rank()):
            log.info("memplug: %s launches kernels that no operator shows: from now on it is a unit", _name(function))
        return unit

    def _unit(self, function: type, communicates: bool, chooses: bool) -> Unit:
        if communicates:
            kind = CaptureKind.COLLECTIVE
        elif chooses:
            kind = CaptureKind.CHOICE
        else:
            kind = (
                CaptureKind.ATTENTION if _ATTENTION.search(_name(function)) else CaptureKind.ROWS
            )  # a function may be as expensive as a matmul
        return Unit(self._executor, function.__name__, kind, is_shared=communicates, writes_unsaid=True)


def _chooses(given: list[torch.Tensor], returned: list[torch.Tensor]) -> bool:
    return any(each.dtype in _CHOICES for each in returned) and not any(each.dtype in _CHOICES for each in given)


def _name(function: type) -> str:
    return f"{function.__module__}.{function.__qualname__}"
