"""The problem that a swap list solves, as data: one step without swaps, its candidates, the link and the budgets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

FROM_THE_BEGINNING = -1
"""In place of a last use: the gap begins with the step."""


class Candidate(NamedTuple):
    """A tensor between two of its uses: its gap is the operators in between."""

    tensor: int
    """Into `Trace.tensors`."""
    nbytes: int
    last_use: int
    """Operator that uses it last before the gap; `FROM_THE_BEGINNING`: none in this step."""
    next_use: int
    """Operator that uses it next; the number of those of the program: none of them, and it is back behind them."""

    @property
    def gap(self) -> slice:
        """The operators for which it may be away, at most."""
        return slice(self.last_use + 1, self.next_use)


class Swap(NamedTuple):
    """One candidate's way: its memory is free for operators [release, prefetch)."""

    candidate: int
    """Into `SwapProblem.candidates`."""
    release: int
    """Its memory is released before this operator, once the copy to the host, begun after the last use, is done."""
    prefetch: int
    """It has memory again, and the copy to the device begins, before this operator; it is done at the next use."""


class Link:
    """One direction between device and host, of which other copies take a part.

    Args:
        begin_s: float64[n + 1], rising: when each operator begins, and when the last one ends.
        busy_s: float64[n]: seconds of other copies while each operator runs.
        bytes_per_s: above 0.
    """

    def __init__(self, begin_s: np.ndarray, busy_s: np.ndarray, bytes_per_s: float) -> None:
        self._times_s: list[float] = begin_s.tolist()
        self._free_s: list[float] = np.concatenate(([0.0], np.maximum(np.diff(begin_s) - busy_s, 0).cumsum())).tolist()
        self._bytes_per_s = bytes_per_s

    def seconds(self, nbytes: int) -> float:
        """Eq. 3: T_swap = S / B, on a link that is free."""
        return nbytes / self._bytes_per_s

    def finish_s(self, start_s: float, nbytes: int) -> float:
        """When a copy that starts then is done; after the step the link is free."""
        return _at(self._free_s, self._times_s, self.free_until_s(start_s) + self.seconds(nbytes), bisect_left)

    def start_s(self, finish_s: float, nbytes: int) -> float:
        """When a copy that is done then starts, at the latest; below 0: before the step."""
        return _at(self._free_s, self._times_s, self.free_until_s(finish_s) - self.seconds(nbytes), bisect_right)

    def free_until_s(self, time_s: float) -> float:
        """Seconds that other copies leave from the step's beginning to a time."""
        return _at(self._times_s, self._free_s, time_s, bisect_right)

    def bytes_between(self, start_s: float, finish_s: float) -> float:
        """Bytes that can be copied between two times."""
        return (self.free_until_s(finish_s) - self.free_until_s(start_s)) * self._bytes_per_s


def _at(x: list[float], y: list[float], value: float, bisect: type[bisect_left]) -> float:
    """Interpolates; outside of the points in a line of slope 1."""
    if value <= x[0]:
        return y[0] + value - x[0]
    if value >= x[-1] and not (bisect is bisect_left and value == x[-1]):
        return y[-1] + value - x[-1]
    after = bisect(x, value)
    width = x[after] - x[after - 1]
    share = (value - x[after - 1]) / width if width > 0 else 1.0
    return y[after - 1] + share * (y[after] - y[after - 1])


@dataclass(frozen=True, kw_only=True, eq=False)
class SwapProblem:
    """One step. Times are as without swaps; operators are named by their index in the step.

    Attributes:
        in_use_bytes: int64[n]: the most device memory in use while each operator runs, if nothing were swapped.
        begin_s: float64[n + 1], rising: when each operator begins, and when the last one ends.
        candidates: that may be swapped.
        budget_bytes: device memory that no operator may exceed.
        host_bytes: host memory for all that is swapped.
        d2h_bytes_per_s, h2d_bytes_per_s: of the link, while both directions run.
        d2h_busy_s, h2d_busy_s: float64[n]: link time that other copies take while each operator runs.
    """

    in_use_bytes: np.ndarray
    begin_s: np.ndarray
    candidates: tuple[Candidate, ...]
    budget_bytes: int
    host_bytes: int
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_busy_s: np.ndarray
    h2d_busy_s: np.ndarray

    @property
    def operators(self) -> int:
        """How many the step has, with what runs behind the program as one of them."""
        return len(self.in_use_bytes)

    @cached_property
    def out_link(self) -> Link:
        """From device to host."""
        return Link(self.begin_s, self.d2h_busy_s, self.d2h_bytes_per_s)

    @cached_property
    def in_link(self) -> Link:
        """From host to device."""
        return Link(self.begin_s, self.h2d_busy_s, self.h2d_bytes_per_s)

    @cached_property
    def times_s(self) -> list[float]:
        """`begin_s` as a list."""
        return self.begin_s.tolist()

    def in_use_with(self, swaps: tuple[Swap, ...]) -> np.ndarray:
        """int64[n]: `in_use_bytes` without what is away."""
        change = np.zeros(self.operators + 1, np.int64)
        for swap in swaps:
            nbytes = self.candidates[swap.candidate].nbytes
            change[swap.release] -= nbytes
            change[max(swap.prefetch, swap.release)] += nbytes
        return self.in_use_bytes + change[:-1].cumsum()


class Least(NamedTuple):
    """The least budget under which a step can run at all, whatever it waits for."""

    nbytes: int
    operator: int
    """That needs it."""


def least_budget(problem: SwapProblem) -> Least:
    """Every candidate away for its whole gap: nothing can take less."""
    everything = tuple(Swap(index, each.gap.start, each.gap.stop) for index, each in enumerate(problem.candidates))
    in_use = problem.in_use_with(everything)
    operator = int(in_use.argmax())
    return Least(int(in_use[operator]), operator)


class OverBudgetError(Exception):
    """No swap list keeps the step to its budgets.

    Attributes:
        least: see there.
        host_limited: with more host memory there is one.
    """

    def __init__(self, problem: SwapProblem) -> None:
        self.least = least_budget(problem)
        self.host_limited = self.least.nbytes <= problem.budget_bytes
        super().__init__(f"operator {self.least.operator} takes at least {self.least.nbytes} bytes")
