"""Custom autograd functions that launch kernels past torch's dispatcher: Triton's, those of extensions, of anyone.

What a region's first forward shows of each of them tells: where memory that it returned or saved was filled by no
operator, it is a unit from the next forward on.
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
        self._told = 0
        self._is_on = True

    def found_some(self) -> bool:
        """Whether there are more of them than when it was asked last."""
        before, self._told = self._told, len(self._units)
        return self._told > before

    def apply(self, function: type, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call(*args, **kwargs)`, the `apply` of a function."""
        executor = self._executor
        if not self._is_on or executor.core is None:
            return call(*args, **kwargs)
        unit = self._units.get(function)
        if unit is not None:
            return unit.run(call, args, kwargs)
        if function in self._visible or not executor.core.observes() or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        since = executor.core.Since(args)
        out = call(*args, **kwargs)
        if executor.core.hides(since, out):
            self._units[function] = self._unit(function, executor.core.communicates(since))
        else:
            self._visible.add(function)
        return out

    def stop(self) -> None:
        """No call is looked at any more."""
        self._is_on = False

    def _unit(self, function: type, communicates: bool) -> Unit:
        name = f"{function.__module__}.{function.__qualname__}"
        if communicates or name in EXCHANGES:
            return Unit(self._executor, function.__name__, Kind.COLLECTIVE, is_shared=True)
        kind = Kind.ATTENTION if _ATTENTION.search(name) else Kind.ROWS  # a product, for all that is known
        return Unit(self._executor, function.__name__, kind)
