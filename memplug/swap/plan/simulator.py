"""Places the copies of chosen candidates beside other copies on the link, and predicts the waiting (Chameleon, 5.4).

The paper assigns each copy to one logical layer that has enough time for it. Here the copies of each direction follow
one another on the link, and may last longer than a layer: a copy of logits may take as long as several layers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memplug.swap.plan.problem import Swap, SwapProblem

Needed = Mapping[int, tuple[int, int]]
"""By index of a candidate, the operators [first, end) at which it must be away, even if the step has to wait for that;
none if end <= first."""

NOT_FORCED = (1 << 62, -1)
"""The candidate is away only while no operator waits for it."""


def place(problem: SwapProblem, needed: Needed) -> tuple[Swap, ...]:
    """Place offloads as early and prefetches as late as possible, without waits except at operators in `needed`.

    A copy to the host begins after the candidate's last use, and after the copy before it (5.4.2). The memory is
    released before the first operator that need not wait for the copy. Prefetches are placed from the end of the step
    to its beginning. Each ends at the candidate's next use, or when the prefetch after it begins, if that is earlier
    (5.4.1).

    Args:
        problem: the step.
        needed: the candidates to swap, see `Needed`.

    Returns:
        The swaps, sorted by candidate. If a prefetch would have to begin before the release, `prefetch` equals
        `release`.
    """
    times_s, candidates = problem.times_s, problem.candidates
    done_s, free_s = {}, 0.0
    for index in sorted(needed, key=lambda index: (candidates[index].last_use, index)):
        start_s = max(free_s, times_s[candidates[index].last_use + 1])
        done_s[index] = free_s = problem.out_link.finish_s(start_s, candidates[index].nbytes)
    start_s, taken_s = {}, float("inf")
    for index in sorted(needed, key=lambda index: (candidates[index].next_use, index), reverse=True):
        finish_s = min(taken_s, times_s[candidates[index].next_use])
        start_s[index] = taken_s = problem.in_link.start_s(finish_s, candidates[index].nbytes)
    swaps = []
    for index in sorted(needed):
        gap, (first, end) = candidates[index].gap, needed[index]
        release = min(max(bisect_left(times_s, done_s[index]), gap.start), gap.stop)
        prefetch = min(max(bisect_right(times_s, start_s[index]) - 1, gap.start), gap.stop)
        if end > first:
            release, prefetch = min(release, first), max(prefetch, end)
        swaps.append(Swap(index, release, max(release, prefetch)))
    return tuple(swaps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A step under a swap list.

    Attributes:
        in_use_bytes: int64[n], see `SwapProblem`.
        release_stalls_s: for each swap, how long its release waits for the copy to the host.
        use_stalls_s: for each swap, how long its next use waits for the copy to the device.
        step_s: duration of the step.
    """

    in_use_bytes: np.ndarray
    release_stalls_s: tuple[float, ...]
    use_stalls_s: tuple[float, ...]
    step_s: float

    @property
    def stall_s(self) -> float:
        """Return the seconds that the step waits for copies."""
        return sum(self.release_stalls_s) + sum(self.use_stalls_s)


def simulate(problem: SwapProblem, swaps: Sequence[Swap]) -> Simulation:
    """Simulate the step: the device waits for each copy before the release or the next use that depends on it.

    Copies of one direction follow one another in program order. Other copies are assumed to run beside the same
    operators as without swaps; while the device waits, these copies wait too.
    """
    events = []
    for number, swap in enumerate(swaps):
        candidate = problem.candidates[swap.candidate]
        if swap.prefetch > swap.release:
            # Order between two operators: offloads, releases, prefetches (sorted by next use), next uses.
            events.append((candidate.last_use + 1, 0, 0, number))
            events.append((swap.release, 1, 0, number))
            events.append((swap.prefetch, 2, candidate.next_use, number))
            events.append((candidate.next_use, 3, 0, number))
    release_stalls, use_stalls = [0.0] * len(swaps), [0.0] * len(swaps)
    done_s, back_s = {}, {}
    stalled_s, out_free_s, in_free_s = 0.0, 0.0, 0.0
    for operator, kind, _, number in sorted(events):
        nbytes = problem.candidates[swaps[number].candidate].nbytes
        now_s = problem.times_s[operator] + stalled_s
        if kind == 0:
            start_s = max(now_s, out_free_s) - stalled_s
            done_s[number] = out_free_s = problem.out_link.finish_s(start_s, nbytes) + stalled_s
        elif kind == 1:
            release_stalls[number] = max(0.0, done_s[number] - now_s)
            stalled_s += release_stalls[number]
        elif kind == 2:
            start_s = max(now_s, in_free_s) - stalled_s
            back_s[number] = in_free_s = problem.in_link.finish_s(start_s, nbytes) + stalled_s
        else:
            use_stalls[number] = max(0.0, back_s[number] - now_s)
            stalled_s += use_stalls[number]
    return Simulation(
        in_use_bytes=problem.in_use_with(tuple(swaps)),
        release_stalls_s=tuple(release_stalls),
        use_stalls_s=tuple(use_stalls),
        step_s=problem.times_s[-1] + stalled_s,
    )
