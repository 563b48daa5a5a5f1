"""A planner for problems without structure: greedy placement in many orders, improving the best.

Each order sorts buffers by a random mix of features (size, duration, load), and places them first fit or best fit. In
the best order, buffers that end above the target height are then moved to the front (squeaky wheel optimisation: Joslin
and Clements, JAIR 10, 1999). A placement that gets as high as the best so far is abandoned. A solution is proven
optimal only at the lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memplug.arena.plan.first_fit import Placer
from memplug.arena.plan.intervals import largest_within, load_bytes
from memplug.arena.plan.problem import Problem, Solution, solved

_PATIENCE = 12
"""After this many consecutive moves to the front that lower no height, random orders follow again."""


def solve(
    problem: Problem,
    *,
    deadline_s: float | None = None,
    enough_bytes: int | None = None,
    start: np.ndarray | None = None,
    improve: bool = True,
    seed: int = 0,
) -> Solution:
    """Return the lowest placement found, valid whenever the search ends. Ignore streams; see `streams`.

    Args:
        problem: any number of buffers.
        deadline_s: when to end, on the clock of `time.monotonic`; None: after the fixed orders. The first placement is
            always finished.
        enough_bytes: the height to end at; by default the lower bound.
        start: offsets of a valid solution to improve, int64[n].
        improve: go on after the fixed orders.
        seed: of the random orders.
    """
    began = time.monotonic()
    state = _BestPlacement(problem, max(enough_bytes or 0, problem.lower_bound), deadline_s)
    if start is not None:
        state.keep(start)
    for order, tightest in _fixed_orders(state.placer):
        if state.ends():
            break
        state.try_order(order, tightest)
    timed_out = state.ends() and not state.is_enough()
    if improve and deadline_s is not None and not state.ends():
        _improve(state, np.random.default_rng(seed))
        timed_out = not state.is_enough()
    return solved(problem, state.offsets, "search", seconds=time.monotonic() - began, timed_out=timed_out)


class _BestPlacement:
    """The best placement so far."""

    def __init__(self, problem: Problem, enough_bytes: int, deadline_s: float | None) -> None:
        self.problem, self.enough_bytes, self.deadline_s = problem, enough_bytes, deadline_s
        self.placer = Placer.of(problem.buffers)
        self.size = problem.buffers["size"]
        self.offsets = np.zeros(0, np.int64)
        self.height: int | None = None if len(problem) else 0
        self.tightest = False

    def ends(self) -> bool:
        """Return whether the best placement is low enough, or the time is over."""
        if self.height is None:
            return False
        return self.is_enough() or (self.deadline_s is not None and time.monotonic() >= self.deadline_s)

    def is_enough(self) -> bool:
        """Return whether the best placement is low enough."""
        return self.height is not None and self.height <= self.enough_bytes

    def try_order(self, order: np.ndarray, tightest: bool) -> bool:
        """Place in that order; return whether the height became lower."""
        limit = {} if self.height is None else {"limit_bytes": self.height}
        offsets = self.placer.place(order, tightest=tightest, **limit)
        if offsets is None:
            return False
        self.tightest = tightest
        self.keep(offsets)
        return True

    def keep(self, offsets: np.ndarray) -> None:
        """Keep a placement as the best."""
        self.offsets, self.height = offsets, int((offsets + self.size).max(initial=0))


def _fixed_orders(placer: Placer) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield each order, and whether to place best fit; ties keep the order of the table."""
    size, duration = placer.size, placer.upper - placer.lower
    features = (
        (size,),
        (size, duration),
        (duration, size),
        (size.astype(np.float64) * duration,),
    )
    for keys in features:
        order = np.lexsort([-key for key in reversed(keys)])
        yield order, False
        yield order, True


def _improve(state: _BestPlacement, random: np.random.Generator) -> None:
    draw = _random_orders(state, random)
    while not state.ends():
        if state.try_order(*next(draw)):
            _move_to_front(state)
        # Now and then, start again from the best placement, with its order shuffled a little.
        elif random.random() < 0.2:
            _move_to_front(state, random)


def _move_to_front(state: _BestPlacement, random: np.random.Generator | None = None) -> None:
    """Move buffers that end above the target to the front, again and again, until that stops lowering the height."""
    # Sort by offset: placing the lowest buffer first gives no higher placement than the order that led to the offsets.
    order = np.argsort(state.offsets, kind="stable")
    if random is not None:
        order = order[np.argsort(np.arange(len(order)) + random.normal(0, 0.01 * len(order), len(order)))]
    offsets, failures = state.offsets, 0
    while failures < _PATIENCE and not state.ends():
        above = (offsets + state.size)[order] > state.enough_bytes
        order = np.concatenate([order[above], order[~above]])
        before = state.height
        # Allow a placement to be 2 % higher than the best, since the moves after it may lead to a lower one.
        found = state.placer.place(order, tightest=state.tightest, limit_bytes=before + before // 50)
        if found is None:
            return
        offsets = found
        if int((offsets + state.size).max()) < before:
            state.keep(offsets)
            failures = 0
        else:
            failures += 1


@dataclass(frozen=True, slots=True)
class _Features:
    """Logarithms of the features from which orders are mixed, float64[n] each."""

    size: np.ndarray
    duration: np.ndarray
    load: np.ndarray  # most bytes in use during each lifetime, as a share of the lower bound; no logarithm


def _random_orders(state: _BestPlacement, random: np.random.Generator) -> Iterator[tuple[np.ndarray, bool]]:
    lower, upper, size = state.placer.lower, state.placer.upper, state.size
    load = largest_within(load_bytes(lower, upper, size), lower, upper) / state.problem.lower_bound
    features = _Features(np.log(size), np.log((upper - lower).astype(np.float64)), load)
    while True:
        weight = random.exponential(size=4) * (1, random.integers(2), 10 * random.integers(2), random.integers(2))
        key = weight[0] * features.size + weight[1] * features.duration + weight[2] * features.load
        # Round down to tenths, so that all buffers that live at the fullest times come first.
        key += weight[3] * np.floor(10 * features.load)
        yield np.argsort(-key, kind="stable"), bool(random.integers(2))
