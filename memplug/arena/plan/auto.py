"""Runs the planners that fit the time limit, and keeps the lowest solution that the judge accepts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from memplug import planners
from memplug.arena.judge import judge
from memplug.arena.plan import exact, search
from memplug.arena.plan.blocks import BlockedProblem
from memplug.arena.plan.first_fit import Placer
from memplug.arena.plan.problem import Problem, Solution, solved
from memplug.arena.plan.streams import on_one_stream
from memplug.errors import LayoutError, coded

log = logging.getLogger("memplug")

TIME_LIMIT_S = 10.0
ENOUGH = 1e-4
"""`auto` ends at a height within this share above the lower bound: less is not worth waiting for."""

Progress = Callable[[str], None]


def plan(
    problem: Problem,
    planner: str = planners.AUTO,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    capacity_bytes: int | None = None,
    progress: Progress = lambda text: None,
) -> Solution:
    """Return a solution that the judge has accepted; buffers that outlive the step lie at the bottom.

    Args:
        problem: any layout problem.
        planner: the only planner to use, one of `planners.names`; "auto": the best solution of several planners. If
            there are too many buffers, "exact" does not search, and returns a greedy placement.
        time_limit_s: seconds. The planner finishes at least one greedy placement, even if that takes longer.
        capacity_bytes: bytes of the device: the planner ends at the first height within them. None: it seeks the lowest
            height.
        progress: called with the name of each attempt.

    Raises:
        LayoutError: the judge refuses all solutions, so memplug has a bug.
    """
    began = time.monotonic()
    rest = np.flatnonzero(~_kept(problem))
    if len(rest) == len(problem):
        return replace(_plan(problem, planner, time_limit_s, capacity_bytes, progress), seconds=_since(began))
    offsets, floor = _stack(problem, np.flatnonzero(_kept(problem)))
    left = None if capacity_bytes is None else max(0, capacity_bytes - floor)
    found = _plan(problem.part(rest), planner, time_limit_s, left, progress)
    offsets[rest] = floor + found.offsets
    exact_floor = floor == int(problem.buffers["size"].sum()) - int(problem.buffers["size"][rest].sum())
    solution = solved(
        problem,
        offsets,
        found.planner,
        proven=found.optimal and exact_floor,
        seconds=_since(began),
        timed_out=found.timed_out,
    )
    if judge(problem, solution):
        raise _refused()
    return solution


def _kept(problem: Problem) -> np.ndarray:
    """Return which buffers outlive the step and are in use all through it: they share no bytes. bool[n]."""
    table = problem.buffers
    always = (table["lower"] == table["lower"].min(initial=0)) & (table["upper"] == table["upper"].max(initial=0))
    return table["outlives"] & always


def _stack(problem: Problem, rows: np.ndarray) -> tuple[np.ndarray, int]:
    """Place `rows` at the bottom of the arena; return offsets of all buffers, and the end of these rows.

    At the bottom they never lie between two other buffers, so they divide no free stretch (ProTrain, appendix B.2).
    """
    table = problem.buffers
    offsets, end = np.zeros(len(table), np.int64), 0
    for row in rows[np.argsort(-table["alignment"][rows], kind="stable")].tolist():
        offsets[row] = -(-end // int(table["alignment"][row])) * int(table["alignment"][row])
        end = int(offsets[row] + table["size"][row])
    largest = int(np.lcm.reduce(table["alignment"]))
    return offsets, -(-end // largest) * largest


def _plan(
    problem: Problem, planner: str, time_limit_s: float, capacity_bytes: int | None, progress: Progress
) -> Solution:
    began = time.monotonic()
    blocks = on_one_stream(problem, lambda part: search.solve(part, improve=False).offsets)
    plain = blocks.problem
    enough = capacity_bytes if capacity_bytes is not None and capacity_bytes >= plain.lower_bound else None
    attempt = _Attempt(problem, blocks, began, began + time_limit_s, enough)
    if planner == planners.AUTO:
        _try_all(attempt, progress)
    else:
        progress(planner)
        attempt.offer(planners.named(planner).solve(plain, deadline_s=attempt.deadline_s, enough_bytes=enough))
    if attempt.best is None:
        raise _refused()
    return attempt.best


def _refused() -> LayoutError:
    return LayoutError(
        "the judge accepts no plan of this problem",
        "Please report it, with the trace or the file that it comes from.",
        code="MP016",
    )


def _since(began: float) -> float:
    return time.monotonic() - began


@dataclass
class _Attempt:
    """The search for the lowest solution that the judge accepts.

    Attributes:
        problem: the problem with all its streams.
        blocks: the same problem on one stream, as planners see it.
        began_s, deadline_s: on the clock of `time.monotonic`.
        enough: the height to end at, if one was given.
        best: the lowest accepted solution so far.
        plain_offsets: the offsets of `best`, as its planner returned them for `blocks`.
    """

    problem: Problem
    blocks: BlockedProblem
    began_s: float
    deadline_s: float
    enough: int | None
    best: Solution | None = None
    plain_offsets: np.ndarray | None = None

    @property
    def goal(self) -> int:
        """Return the height at which the search ends, in bytes."""
        bound = self.blocks.problem.lower_bound
        return int(bound * (1 + ENOUGH)) if self.enough is None else self.enough

    @property
    def done(self) -> bool:
        """Return whether the best solution is low enough, or the time is over and there is a solution."""
        low_enough = self.best is not None and self.best.height <= self.goal
        return low_enough or (self.best is not None and time.monotonic() >= self.deadline_s)

    def until(self, share: float) -> float:
        """Return the time at which this share of the time limit is over."""
        return self.began_s + share * (self.deadline_s - self.began_s)

    def offer(self, found: Solution) -> None:
        """Keep a planner's solution, if it is lower and the judge accepts it."""
        plain = self.blocks.problem
        if plain.buffers["room"].any():  # not all planners place rooms first
            offsets = Placer.of(plain.buffers).place(np.argsort(found.offsets, kind="stable"))
            found = solved(plain, offsets, found.planner, timed_out=found.timed_out)
        if self.best is not None and (found.height, not found.optimal) >= (self.best.height, not self.best.optimal):
            return
        solution = solved(
            self.problem,
            self.blocks.expand(found.offsets),
            found.planner,
            # With several streams, a planner proves a solution optimal only among those that `on_one_stream` allows.
            proven=found.optimal and len(np.unique(self.problem.buffers["stream"])) <= 1,
            timed_out=found.timed_out,
        )
        findings = judge(self.problem, solution)
        if findings:
            text = (
                "memplug: the judge refuses the solution of %s: %s. memplug uses the next best. Please report this "
                "with a trace"
            )
            log.warning(coded("MP016", text), found.planner, findings[0].message)
            return
        self.best, self.plain_offsets = solution, found.offsets


def _try_all(attempt: _Attempt, progress: Progress) -> None:
    """Try the quickest planners first, until a solution is low enough; random orders come last."""
    plain, goal = attempt.blocks.problem, attempt.goal
    progress("search: fixed orders")
    attempt.offer(search.solve(plain, deadline_s=attempt.until(0.5), enough_bytes=goal, improve=False))
    if not attempt.done and len(plain) <= exact.PROMISING:
        progress("exact")
        share = 0.7 if attempt.enough is None else 0.9
        attempt.offer(exact.solve(plain, deadline_s=attempt.until(share), enough_bytes=attempt.enough))
    if not attempt.done and exact.PROMISING < len(plain) <= exact.LARGEST:
        progress("exact")
        share = 0.8 if attempt.enough is None else 1.0
        attempt.offer(exact.solve(plain, deadline_s=attempt.until(share), enough_bytes=attempt.enough))
    for planner in planners.PLANNERS:
        if not attempt.done and attempt.best is None:  # the judge has refused all solutions so far
            progress(planner.name)
            attempt.offer(planner.solve(plain, deadline_s=attempt.until(0.9), enough_bytes=goal))
    if not attempt.done:
        progress("search: random orders")
        start = attempt.plain_offsets
        attempt.offer(search.solve(plain, deadline_s=attempt.deadline_s, enough_bytes=goal, start=start))
    if attempt.best is not None and not attempt.best.optimal and time.monotonic() >= attempt.deadline_s:
        attempt.best = replace(attempt.best, timed_out=True)
