"""The problem that a swap list solves: one step without swaps, its candidates, the link and the budgets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

FROM_THE_BEGINNING = -1
"""The value of `last_use` if nothing uses the tensor before the gap, which then begins with the step."""


class Candidate(NamedTuple):
    """A tensor between two of its uses; the operators in between are its gap."""

    tensor: int
    """Row of `Trace.tensors`."""
    nbytes: int
    last_use: int
    """The operator that uses it last before the gap; `FROM_THE_BEGINNING` if none does in this step."""
    next_use: int
    """The program's operator that uses it next. If there is none, the tensor returns after the program's last operator:
    then this is the number of the program's operators."""

    @property
    def gap(self) -> slice:
        """Return the operators during which the tensor may be away from the device."""
        return slice(self.last_use + 1, self.next_use)


class Swap(NamedTuple):
    """The swap of one candidate, whose device memory is free from operator `release` to just before `prefetch`."""

    candidate: int
    """Index into `SwapProblem.candidates`."""
    release: int
    """The operator before which the tensor's memory is released; the operator waits for the copy to the host."""
    prefetch: int
    """The operator before which the tensor gets memory and is copied to the device; the next use waits for the copy."""


class LinkDirection:
    """One direction of the link between device and host, shared with other copies.

    Args:
        begin_s: float64[n + 1], rising: beginning of each operator, and end of the last one.
        busy_s: float64[n]: seconds of other copies while each operator runs.
        bytes_per_s: rate of the link, above 0.
    """

    def __init__(self, begin_s: np.ndarray, busy_s: np.ndarray, bytes_per_s: float) -> None:
        self._times_s: list[float] = begin_s.tolist()
        self._free_s: list[float] = np.concatenate(([0.0], np.maximum(np.diff(begin_s) - busy_s, 0).cumsum())).tolist()
        self._bytes_per_s = bytes_per_s

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of a copy on a free link (Chameleon, Eq. 3: T_swap = S / B)."""
        return nbytes / self._bytes_per_s

    def finish_s(self, start_s: float, nbytes: int) -> float:
        """Return when a copy that starts at `start_s` is done; after the step the link counts as free."""
        return _at(self._free_s, self._times_s, self.free_until_s(start_s) + self.seconds(nbytes), bisect_left)

    def start_s(self, finish_s: float, nbytes: int) -> float:
        """Return the latest start of a copy that must be done at `finish_s`; below 0: before the step."""
        return _at(self._free_s, self._times_s, self.free_until_s(finish_s) - self.seconds(nbytes), bisect_right)

    def free_until_s(self, time_s: float) -> float:
        """Return for how many seconds between the step's beginning and `time_s` the link is free of other copies."""
        return _at(self._times_s, self._free_s, time_s, bisect_right)

    def bytes_between(self, start_s: float, finish_s: float) -> float:
        """Return the bytes that can be copied between two times."""
        return (self.free_until_s(finish_s) - self.free_until_s(start_s)) * self._bytes_per_s


def _at(x: list[float], y: list[float], value: float, bisect: type[bisect_left]) -> float:
    """Return y at x = `value`, interpolated linearly; outside of the points, with slope 1.

    If several points have this x, the last one counts; with `bisect_left`, or at `x[0]`, the first one counts.
    """
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
    """One step to plan a list for; times are those without swaps, and operators are named by their index in the step.

    Attributes:
        in_use_bytes: int64[n]: the most device memory in use while each operator runs, without swaps.
        begin_s: float64[n + 1], rising: beginning of each operator, and end of the last one.
        candidates: gaps in which tensors may be swapped.
        budget_bytes: device memory that no operator may exceed.
        host_bytes: host memory for all swapped tensors.
        d2h_bytes_per_s, h2d_bytes_per_s: rates of the link, while both directions run.
        d2h_busy_s, h2d_busy_s: float64[n]: link time of other copies while each operator runs.
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
        """Return the number of operators; code after the program counts as one of them."""
        return len(self.in_use_bytes)

    @cached_property
    def out_link(self) -> LinkDirection:
        """Return the link from device to host."""
        return LinkDirection(self.begin_s, self.d2h_busy_s, self.d2h_bytes_per_s)

    @cached_property
    def in_link(self) -> LinkDirection:
        """Return the link from host to device."""
        return LinkDirection(self.begin_s, self.h2d_busy_s, self.h2d_bytes_per_s)

    @cached_property
    def times_s(self) -> list[float]:
        """Return `begin_s` as a list."""
        return self.begin_s.tolist()

    def in_use_with(self, swaps: tuple[Swap, ...]) -> np.ndarray:
        """Return `in_use_bytes` without the tensors that are away. int64[n]."""
        change = np.zeros(self.operators + 1, np.int64)
        for swap in swaps:
            nbytes = self.candidates[swap.candidate].nbytes
            change[swap.release] -= nbytes
            change[max(swap.prefetch, swap.release)] += nbytes
        return self.in_use_bytes + change[:-1].cumsum()


class LeastBudget(NamedTuple):
    """The least budget under which a step can run at all, however long it waits."""

    nbytes: int
    operator: int
    """The operator that needs so much."""


def least_budget(problem: SwapProblem) -> LeastBudget:
    """Return the least budget: what the step needs with every candidate away for its whole gap."""
    everything = tuple(Swap(index, each.gap.start, each.gap.stop) for index, each in enumerate(problem.candidates))
    in_use = problem.in_use_with(everything)
    operator = int(in_use.argmax())
    return LeastBudget(int(in_use[operator]), operator)


class OverBudgetError(Exception):
    """No swap list keeps the step within its budgets.

    Attributes:
        least: see `LeastBudget`.
        host_limited: whether only host memory is too small: with enough of it, some list keeps within `budget_bytes`.
    """

    def __init__(self, problem: SwapProblem) -> None:
        self.least = least_budget(problem)
        self.host_limited = self.least.nbytes <= problem.budget_bytes
        super().__init__(f"operator {self.least.operator} takes at least {self.least.nbytes} bytes")
