"""Counts operators, including those of recompute passes, which a dispatch mode around backward does not see."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import profiler


class Operators:
    """Counts the operators that run inside the `with`, by name without namespace."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> Operators:
        self._profile = profiler.profile(use_kineto=False).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        for event in self._profile.function_events:
            if self._counts(event.name) and not self._is_inside(event):
                self.calls[event.name.partition("::")[2]] += 1

    def _counts(self, name: str) -> bool:
        return name.count("::") == 1

    def _is_inside(self, event: Any) -> bool:
        """Return whether an operator runs inside of another one that is counted."""
        return False


class Launches(Operators):
    """Counts collectives that reach the process group, if `counted` returns True for their operator."""

    def __init__(self, counted: Callable[[Any], bool]) -> None:
        super().__init__()
        self._counted = counted

    def _counts(self, name: str) -> bool:
        return super()._counts(name) and any(map(self._counted, _overloads(*name.split("::"))))

    def _is_inside(self, event: Any) -> bool:
        outer = event.cpu_parent
        return outer is not None and (self._counts(outer.name) or self._is_inside(outer))


def _overloads(namespace: str, name: str) -> Iterator[Any]:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return (getattr(packet, overload) for overload in packet.overloads()) if packet is not None else iter(())
