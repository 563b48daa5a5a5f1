"""What the uses of a tensor say of it, so that it is found again in another step (Chameleon, appendix A).

Exact integers: how many operators have read it, which of the commonest ones, and the last eight. The native core keeps
the same of every tensor while a step runs (memplug/native/features.h).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from memplug.plan.swap.from_trace import clock_of
from memplug.profile.trace import Trace

KINDS = 32
"""Operators that have a bit each, the commonest first."""
RARE = 255
"""Rank of all operators that are rarer than the 254 commonest."""
EDITS = 3
"""Operators more or less, of which a tensor may not become another one's double."""
REACH = 32
"""Places by which a tensor may be off at most. Half of what the native clock looks around by."""


class Features(NamedTuple):
    """Of a tensor, up to one of its uses; see the module's text."""

    uses: int = 0
    kinds: int = 0
    recent: int = 0

    def read_by(self, rank: int) -> Features:
        """After one more operator, of that rank by how often it is run, from 1."""
        bit = 1 << (rank - 1) if 1 <= rank <= KINDS else 0
        return Features(self.uses + 1, self.kinds | bit, (self.recent << 8 | rank) & (1 << 64) - 1)


class Use(NamedTuple):
    """One use of a tensor by the program.

    Attributes:
        place: outermost operator.
        name: of the operator, into `Trace.names`.
        output: of it, else an input.
        slot: its number among the operator's outputs, or inputs.
        features: of the tensor, this use included.
    """

    place: int
    name: int
    output: bool
    slot: int
    features: Features


def ranks(step: Trace) -> dict[int, int]:
    """By operator name, its place among the program's, the commonest first, from 1; `RARE` beyond the 254th."""
    names, counts = np.unique(step.operators["name"][step.operators["depth"] >= 0], return_counts=True)
    by_count = sorted(zip(counts.tolist(), names.tolist(), strict=True), key=lambda each: (-each[0], each[1]))
    return {name: min(rank, RARE) for rank, (_, name) in enumerate(by_count, 1)}


def uses_of(step: Trace) -> Iterator[tuple[int, Use]]:
    """Every use of a tensor by the program, with the tensor, in the order in which they are seen: inputs as an operator
    begins, with the features after all of them; outputs as it ends, behind what ran inside of it.
    """
    rank_of, now = ranks(step), clock_of(step).now.tolist()
    features: dict[int, Features] = {}
    used: dict[int, tuple[list[int], list[int]]] = {}
    for operator, tensor, output in step.uses.tolist():
        used.setdefault(operator, ([], []))[output].append(tensor)

    def seen(operator: int, name: int, output: bool) -> Iterator[tuple[int, Use]]:
        for slot, tensor in enumerate(used[operator][output] if operator in used else ()):
            yield tensor, Use(now[operator], name, output, slot, features.get(tensor, Features()))

    running: list[tuple[int, int, int]] = []
    for operator, (name, depth) in enumerate(step.operators[["name", "depth"]].tolist()):
        if depth < 0:
            continue
        while running and running[-1][2] >= depth:
            yield from seen(*running.pop()[:2], True)
        running.append((operator, name, depth))
        for tensor in used[operator][False] if operator in used else ():
            features[tensor] = features.get(tensor, Features()).read_by(rank_of[name])
        yield from seen(operator, name, False)
    while running:
        yield from seen(*running.pop()[:2], True)


def last_uses(step: Trace, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], tuple[Use, int]]:
    """How tensors are told apart from others at an outermost operator that uses them.

    Two uses look alike if the operators, the slots, sizes and dtypes are the same, and if the tensors would have the same
    features after as few as three operators were left out or inserted: their numbers of uses differ by three at most.

    Args:
        step: one step with tensors.
        wanted: (tensor, place) pairs.

    Returns:
        By pair the use there, by the outermost operator or one inside of it, from which the nearest that looks alike, of
        another tensor, is farthest; and by how many places it may be off at most: less than half way to that one, and too
        few for three operators to close the rest. Pairs are missing that are not told apart.
    """
    found: dict[tuple[int, int], list[Use]] = {}
    alike: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
    for tensor, use in uses_of(step):
        alike.setdefault(_kind(step, tensor, use), []).append((use.place, tensor, use.features.uses))
        if (tensor, use.place) in wanted:
            found.setdefault((tensor, use.place), []).append(use)
    result = {}
    for (tensor, place), uses in found.items():
        distances = [_nearest(tensor, use, alike[_kind(step, tensor, use)]) for use in uses]
        nearest = max(distances)
        if nearest > EDITS:
            tolerance = min(REACH, (nearest - 1) // 2, nearest - EDITS - 1)
            result[tensor, place] = (uses[distances.index(nearest)], tolerance)
    return result


def _kind(step: Trace, tensor: int, use: Use) -> tuple[object, ...]:
    return use.name, use.output, use.slot, *step.tensors[tensor].item()


def _nearest(tensor: int, use: Use, alike: list[tuple[int, int, int]]) -> int:
    """Places to the nearest use of another tensor that looks alike."""
    distances = (
        abs(place - use.place)
        for place, other, uses in alike
        if other != tensor and abs(uses - use.features.uses) <= EDITS
    )
    return min(distances, default=2 * REACH + 1)
