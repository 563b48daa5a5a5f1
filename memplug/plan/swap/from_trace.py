"""The swap problem of a recorded step: memory in use without swaps, tensors with a gap (Chameleon, 4, 5.1 to 5.3)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from memplug.plan.swap.problem import Candidate, SwapProblem
from memplug.profile.trace import Trace


class Away(NamedTuple):
    """A swap, planned or passive, that was in force while a step was recorded: memory free for [release, prefetch)."""

    nbytes: int
    release: int
    prefetch: int


class Link(NamedTuple):
    """Rates while both directions run, in bytes per second, and the link time that other copies take while each
    operator runs: float64[n], or one number for all of them.
    """

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_busy_s: np.ndarray | float = 0.0
    h2d_busy_s: np.ndarray | float = 0.0


def swap_problem(
    step: Trace,
    link: Link,
    *,
    budget_bytes: int,
    host_bytes: int,
    min_bytes: int = 1,
    operator_s: np.ndarray | None = None,
    away: Iterable[Away] = (),
    others: Collection[int] = (),
) -> SwapProblem:
    """What may be swapped in a step, if it is too large for a budget.

    Args:
        step: One step with tensors, see `cut`.
        link: between host and device.
        budget_bytes, host_bytes: as in `SwapProblem`.
        min_bytes: Of a candidate.
        operator_s: float64[n], duration of each operator; without it all last equally long (Eq. 1).
        away: of the swaps that were in force in the step.
        others: Tensors, by index, that another technique decides on, or that live from step to step.

    Returns:
        Candidates are the gaps of tensors made in the step, in program order, with an operator above the budget.
    """
    count = len(step.operators)
    seconds = np.full(count, step.steps[0][2] / max(count, 1)) if operator_s is None else operator_s
    in_use = in_use_without_swaps(step, away)
    above = np.concatenate(([0], np.cumsum(in_use > budget_bytes)))
    candidates = (each for each in gaps(step, min_bytes, others) if above[each.gap.stop] > above[each.gap.start])
    return SwapProblem(
        in_use_bytes=in_use,
        begin_s=np.concatenate(([0.0], np.cumsum(seconds))),
        candidates=tuple(candidates),
        budget_bytes=budget_bytes,
        host_bytes=host_bytes,
        d2h_bytes_per_s=link.d2h_bytes_per_s,
        h2d_bytes_per_s=link.h2d_bytes_per_s,
        d2h_busy_s=np.zeros(count) + link.d2h_busy_s,
        h2d_busy_s=np.zeros(count) + link.h2d_busy_s,
    )


def in_use_without_swaps(step: Trace, away: Iterable[Away] = ()) -> np.ndarray:
    """int64[n]: the most device memory in use while each operator ran, as if nothing had been away (Figure 3).

    Requests between two operators count to the one before them.
    """
    count = len(step.operators)
    operator = np.maximum(step.events["operator"], 0)
    in_use = np.zeros(count, np.int64)
    if not count:
        return in_use
    # In use as an operator begins is what the last event before it left.
    before = np.searchsorted(operator, np.arange(count))
    live = np.concatenate(([step.base_bytes], step.live_bytes))
    in_use[:] = live[before]
    np.maximum.at(in_use, operator, step.live_bytes)
    for each in away:
        in_use[each.release : each.prefetch] += each.nbytes
    return in_use


def gaps(step: Trace, min_bytes: int, others: Collection[int] = ()) -> list[Candidate]:
    """Tensors between two uses with an operator in between, by first and then second use.

    Left out are tensors that were there before the step: whose first use is not an operator's output.
    """
    uses = step.uses
    order = np.argsort(uses["tensor"], kind="stable")
    tensor, operator, output = (uses[column][order] for column in ("tensor", "operator", "output"))
    begins = np.concatenate(([True], tensor[1:] != tensor[:-1]))[: len(tensor)]
    # An operator may read what it writes: made in the step is what no use at its first operator reads.
    first_operator = operator[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    read_first = np.zeros(len(step.tensors), bool)
    read_first[tensor[(operator == first_operator) & ~output]] = True
    large = step.tensors["nbytes"] >= max(min_bytes, 1)
    excluded = np.zeros(len(step.tensors), bool)
    excluded[list(others)] = True
    wanted = large & ~read_first & ~excluded
    here = np.flatnonzero(~begins & (operator > np.roll(operator, 1) + 1) & wanted[tensor])
    found = (
        Candidate(int(tensor[at]), int(step.tensors["nbytes"][tensor[at]]), int(operator[at - 1]), int(operator[at]))
        for at in here
    )
    return sorted(found, key=lambda each: (each.last_use, each.next_use, each.tensor))
