"""Runs what fits the time limit and keeps the best that the judge accepts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from memplug.errors import LayoutError
from memplug.plan import replay
from memplug.plan.layout import bilevel, exact, search, spatiotemporal
from memplug.plan.layout.blocks import Blocks
from memplug.plan.layout.problem import Problem, Solution, solved
from memplug.plan.layout.streams import on_one_stream

log = logging.getLogger("memplug")

PLANNERS = ("auto", "exact", "bilevel", "spatiotemporal", "search")
Planner = Literal["auto", "exact", "bilevel", "spatiotemporal", "search"]
TIME_LIMIT_S = 10.0
ENOUGH = 1e-4
"""Share above the lower bound at which `auto` ends: what is left is not worth waiting for."""

Progress = Callable[[str], None]


def plan(
    problem: Problem,
    planner: Planner = "auto",
    *,
    time_limit_s: float = TIME_LIMIT_S,
    capacity_bytes: int | None = None,
    progress: Progress = lambda text: None,
) -> Solution:
    """Offsets that the judge has accepted.

    Args:
        problem: any.
        planner: one alone, or the best of all. "exact" leaves its search out where there are too many buffers.
        time_limit_s: seconds. At least one greedy placement is always finished.
        capacity_bytes: of the device; a height that fits is enough then.
        progress: is told what is being tried.

    Raises:
        LayoutError: The judge accepts none of what was found: a mistake in memplug.
    """
    began = time.monotonic()
    deadline_s = began + time_limit_s
    blocks = on_one_stream(problem, lambda part: search.solve(part, improve=False).offsets)
    plain = blocks.problem
    enough = capacity_bytes if capacity_bytes is not None and capacity_bytes >= plain.lower_bound else None
    if planner == "auto":
        found = _all(plain, deadline_s, enough, progress)
    else:
        progress(planner)
        found = [_run(planner, plain, deadline_s, enough)]
    return _judged(problem, blocks, found, time.monotonic() - began)


def _run(planner: Planner, problem: Problem, deadline_s: float, enough: int | None) -> Solution:
    if planner == "spatiotemporal":
        return spatiotemporal.solve(problem, deadline_s=deadline_s)
    solve = {"exact": exact.solve, "bilevel": bilevel.solve, "search": search.solve}[planner]
    return solve(problem, deadline_s=deadline_s, enough_bytes=enough)


def _all(problem: Problem, deadline_s: float, enough: int | None, progress: Progress) -> list[Solution]:
    """What was found, the quickest planner first."""
    goal = int(problem.lower_bound * (1 + ENOUGH)) if enough is None else enough
    began = time.monotonic()

    def until(share: float) -> float:
        return began + share * (deadline_s - began)

    progress("search: fixed orders")
    found = [search.solve(problem, deadline_s=until(0.5), enough_bytes=goal, improve=False)]

    def done() -> bool:
        return min(each.height for each in found) <= goal or time.monotonic() >= deadline_s

    if not done():
        progress("spatiotemporal")
        found.append(spatiotemporal.solve(problem, deadline_s=until(0.7)))
    if not done():
        progress("bilevel")
        found.append(bilevel.solve(problem, deadline_s=until(0.2), enough_bytes=goal))
    if not done() and len(problem) <= exact.LARGEST:
        progress("exact")
        found.append(exact.solve(problem, deadline_s=until(0.85 if enough is None else 1), enough_bytes=enough))
    if not done():
        progress("search: random orders")
        best = min(found, key=lambda each: each.height).offsets
        found.append(search.solve(problem, deadline_s=deadline_s, enough_bytes=goal, start=best))
    timed_out = time.monotonic() >= deadline_s
    return [replace(each, timed_out=timed_out and not each.optimal) for each in found]


def _judged(problem: Problem, blocks: Blocks, found: list[Solution], seconds: float) -> Solution:
    """The lowest that the judge accepts; of equal ones that which was found first."""
    for each in sorted(found, key=lambda solution: (solution.height, not solution.optimal)):
        proven = each.optimal and len(blocks.problem) == len(problem)
        solution = solved(
            problem,
            np.ascontiguousarray(blocks.expand(each.offsets)),
            each.planner,
            proven=proven,
            seconds=seconds,
            timed_out=each.timed_out,
        )
        findings = replay.judge(problem, solution)
        if not findings:
            return solution
        log.warning("memplug: the judge refuses what %s found: %s", each.planner, findings[0].message)
    raise LayoutError(
        "the judge accepts no plan of this problem", "Please report it, with the trace or the file that it comes from."
    )
