"""Counts operators, also those of recompute passes, which a dispatch mode around backward alone does not see."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import profiler


class Operators:
    """Counts operators that run within, by name: aten's without their namespace."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> Operators:
        self._profile = profiler.profile(use_kineto=False).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        for event in self._profile.function_events:
            namespace, _, name = event.name.partition("::")
            if name and "::" not in name:
                self._count(namespace, name)

    def _count(self, namespace: str, name: str) -> None:
        self.calls[name if namespace == "aten" else f"{namespace}::{name}"] += 1


class Launches(Operators):
    """Counts collectives that reach the process group, of those that `counted` says."""

    def __init__(self, counted: Callable[[Any], bool]) -> None:
        super().__init__()
        self._counted = counted

    def _count(self, namespace: str, name: str) -> None:
        if any(map(self._counted, _overloads(namespace, name))):
            self.calls[name] += 1


def _overloads(namespace: str, name: str) -> Iterator[Any]:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return (getattr(packet, overload) for overload in packet.overloads()) if packet is not None else iter(())
