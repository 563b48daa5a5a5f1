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
    """Every use of a tensor by the program, with the tensor, in program order.

    Several uses by one operator come in the order of its inputs, with the features that it has after all of them.
    """
    rank_of, now = ranks(step), clock_of(step).now.tolist()
    features: dict[int, Features] = {}
    operators = step.operators[["name", "depth"]].tolist()
    by_operator: dict[int, list[tuple[int, bool]]] = {}
    for operator, tensor, output in step.uses.tolist():
        by_operator.setdefault(operator, []).append((tensor, output))
    for operator, used in by_operator.items():
        name, depth = operators[operator]
        if depth < 0:
            continue
        for tensor, output in used:
            if not output:
                features[tensor] = features.get(tensor, Features()).read_by(rank_of[name])
        for kind in (False, True):
            tensors = [tensor for tensor, output in used if output is kind]
            for slot, tensor in enumerate(tensors):
                yield tensor, Use(now[operator], name, kind, slot, features.get(tensor, Features()))


def last_uses(step: Trace, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], tuple[Use, int]]:
    """How tensors are told apart from others at a use.

    Args:
        step: one step with tensors.
        wanted: (tensor, place) pairs.

    Returns:
        By pair the last use there, and by how many places it may be off at most: less than half way to the nearest use
        of another tensor, or at another place, that looks the same. Pairs are missing that look like another one at the
        same place.
    """
    found: dict[tuple[int, int], Use] = {}
    alike: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for tensor, use in uses_of(step):
        nbytes, dtype = step.tensors[tensor].item()
        alike.setdefault((*use[1:], nbytes, dtype), []).append((use.place, tensor))
        if (tensor, use.place) in wanted:
            found[tensor, use.place] = use
    result = {}
    for (tensor, place), use in found.items():
        nbytes, dtype = step.tensors[tensor].item()
        others = [abs(at - place) for at, other in alike[*use[1:], nbytes, dtype] if (other, at) != (tensor, place)]
        nearest = min(others, default=2 * REACH + 1)
        if nearest > 0:
            result[tensor, place] = (use, min(REACH, (nearest - 1) // 2))
    return result
