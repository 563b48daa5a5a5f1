"""Describes tensors by their uses, so that they are found again in another step (Chameleon, appendix A).

The features are exact integers: how many operators have read the tensor, which of the most frequent operators are among
these readers, and the last eight readers. The native core keeps the same features of every tensor during a step
(memplug/swap/native/tensor_features.h).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from memplug.profile.trace import Trace
from memplug.swap.plan.from_trace import clock_of

KINDS = 32
"""Number of the most frequent operators, each with its own bit in `Features.kinds`."""
RARE = 255
"""Rank of all operators but the 254 most frequent."""
EDITS = 3
"""Number of operators that may be inserted or left out before one tensor can be mistaken for another."""
REACH = 32
"""Upper bound of a tolerance, see `last_uses`: half of the distance that the native clock searches, in places."""


class Features(NamedTuple):
    """The features of a tensor up to one of its uses; see the top of this file."""

    uses: int = 0
    kinds: int = 0
    recent: int = 0

    def read_by(self, rank: int) -> Features:
        """Return the features after one more read, by the operator with this frequency rank (1: the most frequent)."""
        bit = 1 << (rank - 1) if 1 <= rank <= KINDS else 0
        return Features(self.uses + 1, self.kinds | bit, (self.recent << 8 | rank) & (1 << 64) - 1)


class TensorUse(NamedTuple):
    """One use of a tensor by the program.

    Attributes:
        place: index of the outermost operator.
        name: index of the operator's name in `Trace.names`.
        output: True if the tensor is an output of the operator, False if it is an input.
        slot: number of the tensor among the operator's outputs, or among its inputs.
        features: the tensor's features, including this use.
    """

    place: int
    name: int
    output: bool
    slot: int
    features: Features


def ranks(step: Trace) -> dict[int, int]:
    """Return the frequency rank of each operator name in the program, from 1; `RARE` beyond the 254th."""
    names, counts = np.unique(step.operators["name"][step.operators["depth"] >= 0], return_counts=True)
    by_count = sorted(zip(counts.tolist(), names.tolist(), strict=True), key=lambda each: (-each[0], each[1]))
    return {name: min(rank, RARE) for rank, (_, name) in enumerate(by_count, 1)}


def uses_of(step: Trace) -> Iterator[tuple[int, TensorUse]]:
    """Yield (tensor, use) for every use by the program, in the order in which the observer sees them.

    The observer sees an operator's inputs as the operator begins; their features then include this read. It sees the
    outputs as the operator ends, after the uses by nested operators.
    """
    rank_of, now = ranks(step), clock_of(step).now.tolist()
    features: dict[int, Features] = {}
    used: dict[int, tuple[list[int], list[int]]] = {}
    for operator, tensor, output in step.uses.tolist():
        used.setdefault(operator, ([], []))[output].append(tensor)

    def seen(operator: int, name: int, output: bool) -> Iterator[tuple[int, TensorUse]]:
        for slot, tensor in enumerate(used[operator][output] if operator in used else ()):
            yield tensor, TensorUse(now[operator], name, output, slot, features.get(tensor, Features()))

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


def last_uses(step: Trace, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], tuple[TensorUse, int]]:
    """Return a use by which the native core can find each wanted tensor at an outermost operator.

    Two uses look alike if their operators, slots, sizes and dtypes are the same, and their `Features.uses` differ by at
    most `EDITS`: in a step with that many operators more or fewer, their features could be equal. An anchor sets the
    clock to its own place, so that the core does not take a look-alike for the wanted use. The anchor may be a read by
    the look-alike's operator. If the look-alike comes later, it may also be a read by an operator between the two uses.

    Args:
        step: one step with tensors.
        wanted: (tensor, place) pairs.

    Returns:
        (use, tolerance) for each pair that can be told apart from its look-alikes. The tolerance is the most places by
        which the use may be off its planned place. It is less than half of the distance to the nearest look-alike of
        another tensor. It is also less than the distance to the nearest one without such an anchor, minus `EDITS`. If
        nested operators use the tensor too, `use` is the one with the largest tolerance.
    """
    anchored = sorted({place for place, _, _ in anchors(step)})
    found: dict[tuple[int, int], list[TensorUse]] = {}
    alike: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
    made_at: dict[int, int] = {}
    for tensor, use in uses_of(step):
        made_at.setdefault(tensor, use.place)
        alike.setdefault(_kind(step, tensor, use), []).append((use.place, tensor, use.features.uses))
        if (tensor, use.place) in wanted:
            found.setdefault((tensor, use.place), []).append(use)
    result = {}
    for (tensor, place), uses in found.items():
        if made_at[tensor] == place:  # the tensor may have no memory until an inner operator fills it
            uses = uses[-1:]
        tolerance, use = max(
            ((_tolerance(tensor, use, alike[_kind(step, tensor, use)], anchored), use) for use in uses),
            key=lambda each: each[0],
        )
        if tolerance >= 0:
            result[tensor, place] = (use, tolerance)
    return result


def anchors(step: Trace) -> list[tuple[int, int, int]]:
    """Return the anchors: reads of tensors from before the step, such as parameters, that show its progress.

    Returns:
        (place, slot, tensor) of each such read by an outermost operator, in order; slots count the operator's inputs.
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


def _kind(step: Trace, tensor: int, use: TensorUse) -> tuple[object, ...]:
    return use.name, use.output, use.slot, *step.tensors[tensor].item()


def _tolerance(tensor: int, use: TensorUse, alike: list[tuple[int, int, int]], anchored: list[int]) -> int:
    """Return a use's tolerance, see `last_uses`; below 0 if it cannot be told apart from a look-alike."""
    nearest = nearest_without_anchor = 2 * REACH + 1
    for place, other, uses in alike:
        distance = abs(place - use.place)
        if other == tensor or abs(uses - use.features.uses) > EDITS or distance >= nearest_without_anchor:
            continue
        nearest = min(nearest, distance)
        # Anchors of the wanted use's own operator do not count, since a step may leave out that operator.
        first = place if place < use.place else use.place + 1
        after = bisect.bisect_left(anchored, first)
        if after == len(anchored) or anchored[after] > place:
            nearest_without_anchor = distance
    return min(REACH, (nearest + 1) // 2 - 1, nearest_without_anchor - EDITS - 1)
