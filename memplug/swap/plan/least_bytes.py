"""Finds the fewest bytes that bring a step within its budget, with an integer program over the candidates.

It is a covering program: at every operator above the budget, the chosen candidates that may be away there must have at
least as many bytes as the excess. If no operator may wait, the link also limits the bytes that can be away at an
operator o. Candidates that are last used at an operator a or later can have at most the bytes that the link carries
from a to o. Candidates that are next used at an operator b or earlier can have at most the bytes that it carries from
o to b. Both limits are linear in the choice.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

import numpy as np

from memplug.swap.plan.problem import SwapProblem
from memplug.swap.plan.simulator import NOT_FORCED, place

TIME_LIMIT_S = 5.0
"""Time limit for all choices together; the check of the last choice may exceed it."""

GAP = 0.01
"""Share by which a choice may exceed the fewest bytes: to prove a smaller share takes longer than it saves."""

ATTEMPTS = 24
"""Largest number of choices to solve for; each solution excludes the choices before it."""


def cover(
    problem: SwapProblem,
    below_bytes: int,
    *,
    waits: bool,
    among: Collection[int] = (),
    without: Collection[int] = (),
) -> Iterator[tuple[int, ...]]:
    """Yield choices of candidates that swap fewer bytes than `below_bytes`, the fewest first.

    A choice may still exceed the budget or wait, so the caller has to simulate it.

    Args:
        problem: the step.
        below_bytes: bytes of a choice that the caller already has.
        waits: whether operators may wait for copies.
        among: candidates that every choice includes.
        without: candidates that every choice excludes.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    gaps = _gaps(problem, waits)
    usable = [index for index, gap in enumerate(gaps) if gap.stop > gap.start]
    sizes = np.array([problem.candidates[index].nbytes for index in usable], float)
    if not usable or below_bytes <= 0:
        return
    coefficients, at_least = _rows(problem, gaps, usable, waits)
    limits = Bounds([float(index in among) for index in usable], [float(index not in without) for index in usable])
    unit = float(sizes.max())
    rows = [*(coefficients * sizes / unit), -sizes / unit, -sizes / unit]
    bounds = [*(at_least / unit), -problem.host_bytes / unit, -(below_bytes - 1) / unit]
    deadline_s = time.monotonic() + TIME_LIMIT_S
    for _ in range(ATTEMPTS):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return
        result = milp(
            sizes / unit,
            integrality=np.ones(len(usable)),
            bounds=limits,
            constraints=LinearConstraint(np.array(rows), lb=np.array(bounds)),
            options={"time_limit": left_s, "mip_rel_gap": GAP},
        )
        if result.x is None:
            return
        picked = result.x > 0.5
        yield tuple(index for index, taken in zip(usable, picked, strict=True) if taken)
        # Exclude this choice.
        rows.append(np.where(picked, -1.0, 1.0))
        bounds.append(1.0 - picked.sum())


def _gaps(problem: SwapProblem, waits: bool) -> list[slice]:
    """Return for each candidate the operators at which it can be away, if it has the link to itself."""
    if waits:
        return [each.gap for each in problem.candidates]
    alone = [place(problem, {index: NOT_FORCED})[0] for index in range(len(problem.candidates))]
    return [slice(swap.release, swap.prefetch) for swap in alone]


def _rows(problem: SwapProblem, gaps: list[slice], usable: list[int], waits: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the constraints: the candidates that each sums up, bool[r, usable], and their least bytes, float64[r]."""
    need = problem.in_use_bytes - problem.budget_bytes
    first = np.array([gaps[index].start for index in usable])
    end = np.array([gaps[index].stop for index in usable])
    last_use = np.array([problem.candidates[index].last_use for index in usable])
    next_use = np.array([problem.candidates[index].next_use for index in usable])
    edges = np.unique(np.concatenate(([0], first, end)))
    edges = edges[edges < problem.operators]
    rows: dict[bytes, tuple[np.ndarray, float]] = {}

    def add(counts: np.ndarray, at_least: float) -> None:
        if at_least > 0:
            key = counts.tobytes()
            rows[key] = (counts, max(at_least, rows[key][1] if key in rows else 0.0))

    for begin, stop in zip(edges.tolist(), [*edges[1:].tolist(), problem.operators], strict=True):
        operator = begin + int(need[begin:stop].argmax())
        away = (first <= operator) & (operator < end)
        add(away, float(need[operator]))
        if waits or need[operator] <= 0:
            continue
        now_s = problem.times_s[operator]
        for early in np.unique(last_use[away]).tolist():
            carried = problem.out_link.bytes_between(problem.times_s[early + 1], now_s)
            add(away & (last_use < early), float(need[operator]) - carried)
        back_s = problem.times_s[operator + 1]
        for late in np.unique(next_use[away]).tolist():
            carried = problem.in_link.bytes_between(back_s, problem.times_s[late])
            add(away & (next_use > late), float(need[operator]) - carried)
    if not rows:
        return np.zeros((0, len(usable)), bool), np.zeros(0)
    counts, at_least = zip(*rows.values(), strict=True)
    return np.array(counts), np.array(at_least)
