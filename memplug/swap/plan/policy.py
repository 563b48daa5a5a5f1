"""Chooses the tensors to swap: first by Algorithm 2 of Chameleon, then by a search for fewer bytes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass

import numpy as np

from memplug.swap.plan.least_bytes import cover
from memplug.swap.plan.problem import Candidate, OverBudgetError, Swap, SwapProblem, least_budget
from memplug.swap.plan.simulator import NOT_FORCED, Simulation, place, simulate

SIZE_WEIGHT = 1.0
"""C of Eq. 2: weight of a tensor's size against the share of operators above the budget that its gap covers."""

NEGLIGIBLE_S = 1e-9
"""Stalls up to this length come from rounding of times."""


REPLACING_S = 1.0
"""Time limit for replacing chosen candidates by smaller ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapList:
    """The chosen swaps, and the step under them.

    Attributes:
        swaps: the chosen swaps, sorted by candidate.
        simulation: the step under these swaps.
        swapped_bytes: bytes copied to the host in a step, and back.
    """

    swaps: tuple[Swap, ...]
    simulation: Simulation
    swapped_bytes: int


Chosen = dict[int, tuple[int, int]]
"""See `simulator.Needed`."""


def swap_list(problem: SwapProblem) -> SwapList:
    """Return a list of few bytes under which no operator exceeds the budget; if possible, one without waits.

    Raises:
        OverBudgetError: no list suffices, even if the step waits for every copy.
    """
    if least_budget(problem).nbytes > problem.budget_bytes:
        raise OverBudgetError(problem)
    found = _list(problem, without_redundant(problem, algorithm_2(problem)))
    waits = found.simulation.stall_s > NEGLIGIBLE_S
    everything = sum(each.nbytes for each in problem.candidates)
    other = _fewest(problem, everything + 1 if waits else found.swapped_bytes, longest_stall_s=None)
    if other is None and waits:
        found = _list(
            problem, with_smaller(problem, {swap.candidate: (swap.release, swap.prefetch) for swap in found.swaps})
        )
        other = _fewest(problem, found.swapped_bytes, longest_stall_s=found.simulation.stall_s)
    return other or found


def _fewest(problem: SwapProblem, below_bytes: int, *, longest_stall_s: float | None) -> SwapList | None:
    """Return a list of fewer than `below_bytes` that waits at most `longest_stall_s` (None: not at all), or None."""
    for candidates in cover(problem, below_bytes, waits=longest_stall_s is not None):
        chosen: Chosen | None = dict.fromkeys(candidates, NOT_FORCED)
        if longest_stall_s is not None:
            chosen = forced(problem, chosen, may_add=False)
        if chosen is None or reductions(problem, place(problem, chosen)).any():
            continue
        if _list(problem, chosen).simulation.stall_s <= (longest_stall_s or 0.0) + NEGLIGIBLE_S:
            return _list(problem, without_redundant(problem, chosen))  # the solver may end slightly above the fewest
    return None


def _list(problem: SwapProblem, chosen: Chosen) -> SwapList:
    swaps = tuple(swap for swap in place(problem, chosen) if swap.prefetch > swap.release)
    return SwapList(
        swaps=swaps,
        simulation=simulate(problem, swaps),
        swapped_bytes=sum(problem.candidates[swap.candidate].nbytes for swap in swaps),
    )


def reductions(problem: SwapProblem, swaps: tuple[Swap, ...] = ()) -> np.ndarray:
    """Return the memory reduction list (5.2): the bytes by which each operator exceeds the budget, or 0. int64[n]."""
    return np.maximum(problem.in_use_with(swaps) - problem.budget_bytes, 0)


def score(candidate: Candidate, reduction_bytes: np.ndarray, largest_bytes: int) -> float:
    """Return a candidate's score, N_MRE + C S (Eq. 2).

    N_MRE is the share of the operators above the budget that lie in the candidate's gap. S is the candidate's size over
    the largest candidate's size.
    """
    entries = np.count_nonzero(reduction_bytes)
    covered = np.count_nonzero(reduction_bytes[candidate.gap])
    return covered / max(entries, 1) + SIZE_WEIGHT * candidate.nbytes / max(largest_bytes, 1)


def candidate_list(problem: SwapProblem, reduction_bytes: np.ndarray, chosen: Chosen) -> list[int]:
    """Return the candidate list (5.3): candidates, not chosen yet, that could lower the excess; best score first."""
    useful = [
        index
        for index, each in enumerate(problem.candidates)
        if index not in chosen and reduction_bytes[each.gap].any()
    ]
    largest = max((problem.candidates[index].nbytes for index in useful), default=0)
    return sorted(useful, key=lambda index: (-score(problem.candidates[index], reduction_bytes, largest), index))


def algorithm_2(problem: SwapProblem) -> Chosen:
    """Choose candidates until the memory reduction list, the excess over the budget, is all 0 (5.5).

    A candidate is chosen if it lowers the excess without waits, and the host has room for it. If no candidate does, the
    step must wait, see `forced`.

    Raises:
        OverBudgetError: no candidate is left that could lower the excess.
    """
    chosen: Chosen = {}
    excess = reductions(problem)
    while excess.any():
        before = len(chosen)
        for index in candidate_list(problem, excess, chosen):
            trial = {**chosen, index: NOT_FORCED}
            left = reductions(problem, place(problem, trial))
            if _fits_host(problem, trial) and left.sum() < excess.sum():
                chosen, excess = trial, left
            if not excess.any():
                break
        if len(chosen) == before:
            waiting = forced(problem, chosen)
            if waiting is None:
                raise OverBudgetError(problem)
            return waiting
    return chosen


def forced(problem: SwapProblem, chosen: Chosen, may_add: bool = True) -> Chosen | None:
    """Return a choice that keeps to the budget by letting the step wait; None if no waiting is enough.

    At the operator with the largest excess, force the best candidate that is not away yet to be away, and let the step
    wait for its copies. Repeat this until there is no excess. Candidates that are already chosen are better than
    others; among each of the two kinds, a higher score is better.

    Args:
        problem: the step.
        chosen: the choice so far.
        may_add: whether candidates outside of `chosen` may be added.
    """
    chosen = dict(chosen)
    while True:
        swaps = place(problem, chosen)
        excess = reductions(problem, swaps)
        if not excess.any():
            return chosen
        worst = int(excess.argmax())
        away = {swap.candidate for swap in swaps if swap.release <= worst < swap.prefetch}
        useful = {
            index
            for index, each in enumerate(problem.candidates)
            if index not in away and each.gap.start <= worst < each.gap.stop and (may_add or index in chosen)
        }
        useful = {index for index in useful if index in chosen or _fits_host(problem, {**chosen, index: NOT_FORCED})}
        if not useful:
            return None
        largest = max(problem.candidates[index].nbytes for index in useful)
        # A candidate that is chosen already costs no further copies.
        best = max(
            useful, key=lambda index: (index in chosen, score(problem.candidates[index], excess, largest), -index)
        )
        first, end = chosen.get(best, NOT_FORCED)
        chosen[best] = (min(first, worst), max(end, worst + 1))


def _fits_host(problem: SwapProblem, chosen: Chosen) -> bool:
    return sum(problem.candidates[index].nbytes for index in chosen) <= problem.host_bytes


def without_redundant(problem: SwapProblem, chosen: Chosen) -> Chosen:
    """Drop candidates, the largest first, if the step keeps to the budget without them and waits no longer."""
    stall_s = _list(problem, chosen).simulation.stall_s
    for index in sorted(chosen, key=lambda index: (-problem.candidates[index].nbytes, index)):
        fewer = {other: needed for other, needed in chosen.items() if other != index}
        swaps = place(problem, fewer)
        if not reductions(problem, swaps).any() and simulate(problem, swaps).stall_s <= stall_s + NEGLIGIBLE_S:
            chosen = fewer
    return chosen


def with_smaller(problem: SwapProblem, chosen: Chosen) -> Chosen:
    """Replace each chosen candidate, the largest first, by a smaller one, or by several with fewer bytes together.

    A replacement stays if no operator exceeds the budget and the step waits no longer.
    """
    stall_s = _list(problem, chosen).simulation.stall_s
    deadline_s = time.monotonic() + REPLACING_S
    for index in sorted(chosen, key=lambda index: (-problem.candidates[index].nbytes, index)):
        rest = chosen.keys() - {index}
        for others in _in_place_of(problem, index, rest):
            if time.monotonic() > deadline_s:
                return chosen
            trial = forced(problem, dict.fromkeys([*rest, *others], NOT_FORCED), may_add=False)
            if trial is not None and _list(problem, trial).simulation.stall_s <= stall_s + NEGLIGIBLE_S:
                chosen = trial
                break
    return chosen


def _in_place_of(problem: SwapProblem, index: int, rest: Set[int]) -> Iterator[tuple[int, ...]]:
    gap, nbytes = problem.candidates[index].gap, problem.candidates[index].nbytes
    smaller = [
        (each.nbytes, other)
        for other, each in enumerate(problem.candidates)
        if other not in rest and each.nbytes < nbytes and each.gap.start < gap.stop and gap.start < each.gap.stop
    ]
    for _, other in sorted(smaller):
        yield (other,)
    below_bytes = nbytes + sum(problem.candidates[each].nbytes for each in rest)
    for candidates in itertools.islice(cover(problem, below_bytes, waits=True, among=rest, without=(index,)), 1):
        yield tuple(set(candidates) - rest)
