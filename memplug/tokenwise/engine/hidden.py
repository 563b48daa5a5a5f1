"""Custom autograd functions that launch kernels past torch's dispatcher: Triton's, those of extensions, of anyone.

The first call that returns anything tells, once and for all of a class: where memory that it returned or saved was
filled by no operator, where it took a tensor's address, or where it changed what it was given and no operator did, it
is a unit from the next call on. A call without elements, as of an expert that gets no tokens, tells nothing.

What such a unit changed in that call, and what it gives back of the memory that it was given, it is taken to write to:
kernels of rotary embeddings do, which no version tells. Not known is what a later call changes besides, without a new
version, and does not give back; nor a parameter that is changed so. A function that returns integers or truth values
and was given none has chosen by values, as a router's kernel does: what it made is captured like that of operators that
choose (memplug.tokenwise.engine.operators). Where gradients are disabled a function is a unit only if it writes to
what it is given; else what it makes is held until backward, like what was there before the region.

A call may be the first to wait for the stream that makes an argument. So one that another stream has made, as the
stream of its node in the graph tells, and that no operator of the region has read, is not copied before the call: a
write to it shows by its version, or where the function gives it back.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from memplug.tokenwise.engine.operators import Kind
from memplug.tokenwise.engine.runs import Runs
from memplug.tokenwise.engine.units import Unit

log = logging.getLogger("memplug")

EXCHANGES = {
    f"megatron.core.transformer.moe.fused_a2a.{name}"
    for name in ("FusedDispatch", "FusedCombine", "HybridEPDispatch", "HybridEPCombine")
}
"""Functions whose own kernels talk to other ranks, which nothing shows."""


_ATTENTION = re.compile("attn|attention", re.IGNORECASE)
_CHOICES = {torch.bool, torch.int16, torch.int32, torch.int64}  # not of a byte: what is quantized may be


class HiddenFunctions:
    """The functions of one session's regions."""

    def __init__(self, executor: Runs):
        self._executor = executor
        self._units: dict[type, Unit] = {}
        self._visible: set[type] = set()
        self._writes_nothing: set[type] = set()  # that it is given, without gradients: what it makes then is held
        self._found = self._told = 0
        self._is_on = True

    @property
    def units(self) -> list[str]:
        """Qualified names of those that are units, sorted."""
        return sorted(set(map(_name, self._units)))

    def found_some(self) -> bool:
        """Whether there are more of them than when it was asked last."""
        before, self._told = self._told, self._found
        return self._told > before

    def apply(self, function: type, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call(*args, **kwargs)`, the `apply` of a function."""
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
            return out  # it could not be run again alone: it is no unit, and is looked at in each call
        unit = self._add(function, communicates, chooses)
        self.note_found()
        unit.note_writes(written)
        return out

    def note_found(self) -> None:
        """What made a region opaque until now is known from its next forward on."""
        self._found += 1

    def stop(self) -> None:
        """No call is looked at any more."""
        self._is_on = False

    def _add(self, function: type, communicates: bool, chooses: bool = False) -> Unit:
        is_new = _name(function) not in self.units  # else its class is made anew for each call
        unit = self._units[function] = self._unit(function, communicates, chooses)
        if is_new and not (dist.is_initialized() and dist.get_rank()):
            log.info("memplug: %s launches kernels that no operator shows: from now on it is a unit", _name(function))
        return unit

    def _unit(self, function: type, communicates: bool, chooses: bool) -> Unit:
        if communicates:
            kind = Kind.COLLECTIVE
        elif chooses:
            kind = Kind.CHOICE
        else:
            kind = Kind.ATTENTION if _ATTENTION.search(_name(function)) else Kind.ROWS  # a product, for all one knows
        return Unit(self._executor, function.__name__, kind, is_shared=communicates, writes_unsaid=True)


def _chooses(given: list[torch.Tensor], returned: list[torch.Tensor]) -> bool:
    return any(each.dtype in _CHOICES for each in returned) and not any(each.dtype in _CHOICES for each in given)


def _name(function: type) -> str:
    return f"{function.__module__}.{function.__qualname__}"
