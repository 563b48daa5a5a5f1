"""Custom autograd functions that launch kernels past torch's dispatcher: Triton's, those of extensions, of anyone.

The first call that returns anything tells: where memory that it returned or saved was filled by no operator, it is
a unit from the next forward on. A call without elements, as of an expert that gets no tokens, tells nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memplug.tokenwise.regions.operators import Kind
from memplug.tokenwise.regions.units import Unit

if TYPE_CHECKING:
    from memplug.tokenwise.regions.executor import Executor

EXCHANGES = {
    f"megatron.core.transformer.moe.fused_a2a.{name}"
    for name in ("FusedDispatch", "FusedCombine", "HybridEPDispatch", "HybridEPCombine")
}
"""Functions whose own kernels talk to other ranks, which nothing shows."""


_ATTENTION = re.compile("attn|attention", re.IGNORECASE)


class HiddenFunctions:
    """The functions of one session's regions."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self._units: dict[type, Unit] = {}
        self._visible: set[type] = set()
        self._found = self._told = 0
        self._is_on = True

    def found_some(self) -> bool:
        """Whether there are more of them than when it was asked last."""
        before, self._told = self._told, self._found
        return self._told > before

    def apply(self, function: type, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call(*args, **kwargs)`, the `apply` of a function."""
        executor = self._executor
        if not self._is_on or executor.core is None:
            return call(*args, **kwargs)
        unit = self._units.get(function)
        if unit is None and _name(function) in EXCHANGES:
            unit = self._units[function] = self._unit(function, communicates=True)
        if unit is not None:
            return unit.run(call, args, kwargs)
        if function in self._visible or not executor.core.observes() or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        since = executor.core.Since(args)
        out = call(*args, **kwargs)
        returned = executor.core.tensors_in(out)
        if returned and not any(tensor.nbytes for tensor in returned):
            executor.core.is_undecided()
        elif executor.core.hides(since, out):
            self._found += 1
            self._units[function] = self._unit(function, executor.core.communicates(since))
        else:
            self._visible.add(function)
        return out

    def stop(self) -> None:
        """No call is looked at any more."""
        self._is_on = False

    def _unit(self, function: type, communicates: bool) -> Unit:
        if communicates:
            return Unit(self._executor, function.__name__, Kind.COLLECTIVE, is_shared=True)
        kind = Kind.ATTENTION if _ATTENTION.search(_name(function)) else Kind.ROWS  # a product, for all that is known
        return Unit(self._executor, function.__name__, kind)


def _name(function: type) -> str:
    return f"{function.__module__}.{function.__qualname__}"
