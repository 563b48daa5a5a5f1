"""The swap problem of a recorded step: memory in use without swaps, tensors with a gap (Chameleon, 4, 5.1 to 5.3).

The clock of a swap list is the program's outermost operators: what an operator runs inside of it, and what runs
without gradients after it, counts to it; what runs behind all of them, such as the optimizer, is one more. Memory is
asked for inside of operators, and a tensor leaves or comes back only between two of them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from memplug.profile.operator_names import COLLECTIVES
from memplug.profile.trace import Trace
from memplug.swap.plan.problem import FROM_THE_BEGINNING, Candidate, SwapProblem

NO_PART = -1
"""Depth of an operator that is no part of the program, and not memplug's own."""


class Link(NamedTuple):
    """Rates while both directions run, in bytes per second, and the link time that other copies take while each
    outermost operator runs: float64[n], or one number for all of them.
    """

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_busy_s: np.ndarray | float = 0.0
    h2d_busy_s: np.ndarray | float = 0.0


class Clock(NamedTuple):
    """The outermost operators of a step's program.

    Attributes:
        outermost: int64[n]: where they are in `Trace.operators`.
        now: int64[operators]: by operator of the trace, the outermost one that runs then, or ran last; 0 before the
            first.
        behind: in `Trace.operators`, the first that runs behind the program; their number: none does.
    """

    outermost: np.ndarray
    now: np.ndarray
    behind: int

    @property
    def ticks(self) -> int:
        """How many there are."""
        return len(self.outermost)

    @property
    def places(self) -> int:
        """The same, and one where something runs behind the program."""
        return self.ticks + (self.behind < len(self.now))


def clock_of(step: Trace) -> Clock:
    """The clock of one step."""
    depth = step.operators["depth"]
    outermost, outside = np.flatnonzero(depth == 0), np.flatnonzero(depth == NO_PART)
    behind = outside[np.searchsorted(outside, outermost[-1]) :] if len(outermost) else outside[:0]
    first = int(behind[0]) if len(behind) else len(depth)
    return Clock(outermost, np.maximum((depth == 0).cumsum() - 1, 0), first)


def swap_problem(
    step: Trace,
    link: Link,
    *,
    budget_bytes: int,
    host_bytes: int,
    min_bytes: int = 1,
    operator_s: np.ndarray | None = None,
    others: Collection[int] = (),
    states: bool = False,
    resident: Collection[int] = (),
) -> SwapProblem:
    """What may be swapped in a step, if it is too large for a budget.

    Args:
        step: One step with tensors and without a swap list, see `cut`.
        link: between host and device.
        budget_bytes, host_bytes: as in `SwapProblem`.
        min_bytes: Of a candidate.
        operator_s: float64[n], duration of each place of the clock; without it all operators last equally long (Eq. 1).
        others: Tensors, by index, that another technique decides on.
        states, resident: See `gaps`.

    Returns:
        Its operators are the places of the clock. Candidates are gaps with an operator above the budget.
    """
    count = clock_of(step).places
    seconds = even_s(step) if operator_s is None else operator_s
    in_use = in_use_bytes(step)
    above = np.concatenate(([0], np.cumsum(in_use > budget_bytes)))
    candidates = (
        each for each in gaps(step, min_bytes, others, states, resident) if above[each.gap.stop] > above[each.gap.start]
    )
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


def even_s(step: Trace) -> np.ndarray:
    """float64[n]: of each place, where all operators last equally long (Eq. 1), and what runs behind them no time."""
    clock = clock_of(step)
    return np.where(np.arange(clock.places) < clock.ticks, step.steps[0][2] / max(clock.ticks, 1), 0.0)


def in_use_bytes(step: Trace) -> np.ndarray:
    """int64[n]: the most device memory in use at each place, in a step without a swap list (Figure 3). What left
    passively is in use: to a recording it never left (memplug/profile/native/requests.h, `Moving`).

    Requests between two operators count to the one before them.
    """
    clock = clock_of(step)
    in_use = np.zeros(clock.places, np.int64)
    if not clock.ticks:
        return in_use
    running = np.maximum(step.events["operator"], 0)
    operator = np.where(running >= clock.behind, clock.ticks, clock.now[running])
    # In use as an operator begins is what the last event before it left.
    before = np.searchsorted(operator, np.arange(clock.places))
    live = np.concatenate(([step.base_bytes], step.live_bytes))
    in_use[:] = live[before]
    np.maximum.at(in_use, operator, step.live_bytes)
    return in_use


def gaps(
    step: Trace, min_bytes: int, others: Collection[int] = (), states: bool = False, resident: Collection[int] = ()
) -> list[Candidate]:
    """Tensors between two uses by the program with an outermost operator in between, by first and then second use.

    Left out are tensors of collectives, and those that were there before the step (whose first use is not an operator's
    output).

    Args:
        step: One step with tensors.
        min_bytes: Of a tensor.
        others: Tensors, by index, that are left out too.
        states: Tensors that live from step to step count as well if the optimizer uses them, also from the step's
            beginning to their first use, and so do gradients: the second use may be no part of the program then.
        resident: With `states`, tensors by index that live from step to step besides, such as frozen parameters: they
            count between two uses, for nothing outside of the program tells which is which as a step begins.
    """
    uses, now = step.uses, clock_of(step).now
    order = np.argsort(uses["tensor"], kind="stable")
    tensor, operator, output = (uses[column][order] for column in ("tensor", "operator", "output"))
    begins = np.concatenate(([True], tensor[1:] != tensor[:-1]))[: len(tensor)]
    # An operator may read what it writes: made in the step is what no use at its first operator reads.
    first_operator = operator[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    wanted = step.tensors["nbytes"] >= max(min_bytes, 1)
    lasting = np.zeros(len(step.tensors), bool)
    lasting[tensor[(operator == first_operator) & ~output]] = True
    wanted[list(others)] = False
    # other streams may use a collective's tensors for as long as nothing waits for them: they never leave
    collective = np.array([name.startswith(COLLECTIVES) for name in step.names], bool)
    wanted[tensor[collective[step.operators["name"][operator]]]] = False
    is_program = step.operators["depth"][operator] >= 0
    time = now[operator] + ~is_program  # what is no part of it comes before the next one
    may_end = np.ones(len(tensor), bool) if states else is_program
    known, there = np.zeros((2, len(step.tensors)), bool)
    if states:
        known[[mark.tensor for mark in marks(step)]] = True
        there[list(resident)] = True
    wanted &= known | there | ~lasting
    here = np.flatnonzero(~begins & (time > np.roll(time, 1) + 1) & wanted[tensor] & may_end & np.roll(is_program, 1))
    found = [
        Candidate(int(tensor[at]), int(step.tensors["nbytes"][tensor[at]]), int(time[at - 1]), int(time[at]))
        for at in here
    ]
    found += (
        Candidate(int(tensor[at]), int(step.tensors["nbytes"][tensor[at]]), FROM_THE_BEGINNING, int(time[at]))
        for at in np.flatnonzero(begins & (time > 0) & (wanted & known)[tensor])
    )
    return sorted(found, key=lambda each: (each.last_use, each.next_use, each.tensor))


def held_bytes(step: Trace) -> int:
    """Of the largest tensor of a collective, which is free a little sooner or later in every step."""
    collective = np.array([name.startswith(COLLECTIVES) for name in step.names], bool)
    tensors = step.uses["tensor"][collective[step.operators["name"][step.uses["operator"]]]]
    return int(step.tensors["nbytes"][tensors].max(initial=0))


class Mark(NamedTuple):
    """Where a tensor that lives from step to step is used first outside of the program: that tells it from others."""

    after: int
    """The outermost operator that ran last."""
    number: int
    """Of the operator that uses it, among those that are no part of the program since; nested ones count."""
    slot: int
    """Among its inputs."""
    tensor: int


def marks(step: Trace) -> list[Mark]:
    """Of all tensors that were there before the step, and are read outside of the program once that has begun."""
    clock = clock_of(step)
    begins = clock.outermost[0] if clock.ticks else len(step.operators)
    outside = begins + np.flatnonzero(step.operators["depth"][begins:] == NO_PART)
    after, at = np.unique(clock.now[outside], return_index=True)
    number_of = np.arange(len(outside)) - np.repeat(at, np.diff(at, append=len(outside)))
    place_of = dict(
        zip(outside.tolist(), zip(clock.now[outside].tolist(), number_of.tolist(), strict=True), strict=True)
    )
    first: dict[int, int] = {}  # by tensor, the operator that uses it first
    lasting, slots, found = set(), dict.fromkeys(place_of, 0), {}
    for operator, tensor, output in step.uses.tolist():
        if first.setdefault(tensor, operator) == operator and not output:
            lasting.add(tensor)
        if operator in place_of and not output:
            if tensor in lasting and tensor not in found:
                found[tensor] = Mark(*place_of[operator], slots[operator], tensor)
            slots[operator] += 1
    return sorted(found.values())


def outside_of(step: Trace, after: int) -> list[int]:
    """Names, into `Trace.names`, of the operators that a mark's number counts."""
    here = (clock_of(step).now == after) & (step.operators["depth"] == NO_PART)
    here[: clock_of(step).outermost[after]] = False
    return step.operators["name"][here].tolist()
