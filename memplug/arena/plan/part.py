"""The arena's part of a plan, beside the problem and its solution: room for dynamic requests, and what is promised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSpace:
    """What requests of one HomoLayer group may reuse of the arena (STWeaver, section 5.2, Eq. 2 to 5).

    Attributes:
        malloc_phase, malloc_layer, free_phase, free_layer: of the group's requests, into the problem's phases and
            layers; -1: outside of layers, or (free_) not freed in the step.
        stream: that they are asked for on.
        lower, upper: on the problem's clock; the group's requests live inside of it.
        spaces: (first byte, end) of what no planned buffer uses in that time; disjoint, rising, none empty.
        members: of the dynamic requests that the group's malloc place had in the recorded step, which ones are the
            group's: running numbers from 0, rising.
        peak_bytes: the most that the group had in use at once, in the recorded step.
    """

    malloc_phase: int
    malloc_layer: int
    free_phase: int
    free_layer: int
    stream: int
    lower: int
    upper: int
    spaces: tuple[tuple[int, int], ...]
    members: tuple[int, ...]
    peak_bytes: int

    @property
    def requests(self) -> int:
        """Of the group, in the recorded step."""
        return len(self.members)


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """What the plan promises, in bytes.

    Attributes:
        arena_bytes: that are reserved: the height of the solution.
        static_peak_bytes: the most that planned requests have in use at once: the problem's lower bound.
        dynamic_peak_bytes: the most that dynamic requests had in use at once, in the recorded step.
        fragmentation: 1 - static_peak_bytes / arena_bytes.
    """

    arena_bytes: int
    static_peak_bytes: int
    dynamic_peak_bytes: int
    fragmentation: float
