"""What the uses of a tensor say of it, so that it is found again in another step (Chameleon, appendix A).

Exact integers: how many operators have read it, which of the commonest ones, and the last eight. The native core keeps
the same of every tensor while a step runs (memplug/swap/native/tensor_features.h).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from memplug.profile.trace import Trace
from memplug.swap.plan.from_trace import clock_of

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

    Two uses look alike if the operators, the slots, sizes and dtypes are the same, and if the tensors would have the
    same features after as few as three operators were left out or inserted: their uses differ by three at most. An
    anchor between the two tells them apart.

    Args:
        step: one step with tensors.
        wanted: (tensor, place) pairs.

    Returns:
        By pair the use there, by the outermost operator or one inside of it, that is told apart best, and by how many
        places it may be off at most: less than half way to the nearest use of another tensor that looks alike, and too
        few for three operators to close the rest, unless an anchor lies in between. Pairs are missing that are not told
        apart.
    """
    anchored = sorted({place for place, _, _ in anchors(step)})
    found: dict[tuple[int, int], list[Use]] = {}
    alike: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
    made_at: dict[int, int] = {}
    for tensor, use in uses_of(step):
        made_at.setdefault(tensor, use.place)
        alike.setdefault(_kind(step, tensor, use), []).append((use.place, tensor, use.features.uses))
        if (tensor, use.place) in wanted:
            found.setdefault((tensor, use.place), []).append(use)
    result = {}
    for (tensor, place), uses in found.items():
        if made_at[tensor] == place:  # it may have had no memory before another operator has filled it
            uses = uses[-1:]
        tolerance, use = max(
            ((_tolerance(tensor, use, alike[_kind(step, tensor, use)], anchored), use) for use in uses),
            key=lambda each: each[0],
        )
        if tolerance >= 0:
            result[tensor, place] = (use, tolerance)
    return result


def anchors(step: Trace) -> list[tuple[int, int, int]]:
    """Tensors that are there from step to step, such as parameters, tell how far a step has come.

    Returns:
        (place, slot among the inputs, tensor) of each that an outermost operator reads, in order.
    """
    first = np.full(len(step.tensors), -1)
    before = set()
    for operator, tensor, output in step.uses.tolist():
        if first[tensor] in (-1, operator) and not output:
            before.add(tensor)
        if first[tensor] == -1:
            first[tensor] = operator
    place_of = {operator: place for place, operator in enumerate(clock_of(step).outermost.tolist())}
    found, slots = [], dict.fromkeys(place_of, 0)
    for operator, tensor, output in step.uses.tolist():
        if operator not in place_of or output:
            continue
        if tensor in before:
            found.append((place_of[operator], slots[operator], tensor))
        slots[operator] += 1
    return found


def _kind(step: Trace, tensor: int, use: Use) -> tuple[object, ...]:
    return use.name, use.output, use.slot, *step.tensors[tensor].item()


def _tolerance(tensor: int, use: Use, alike: list[tuple[int, int, int]], anchored: list[int]) -> int:
    """See `last_uses`; below 0: it is not told apart."""
    nearest = nearest_without_anchor = 2 * REACH + 1
    for place, other, uses in alike:
        distance = abs(place - use.place)
        if other == tensor or abs(uses - use.features.uses) > EDITS or distance >= nearest_without_anchor:
            continue
        nearest = min(nearest, distance)
        # One that is read by the earlier operator alone does not help where that is this one: it may be left out.
        first = place if place < use.place else use.place + 1
        after = bisect.bisect_left(anchored, first)
        if after == len(anchored) or anchored[after] > place:
            nearest_without_anchor = distance
    return min(REACH, (nearest + 1) // 2 - 1, nearest_without_anchor - EDITS - 1)
