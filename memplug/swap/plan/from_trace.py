"""Makes the swap problem of a recorded step: memory in use, and tensors with gaps (Chameleon, 4, 5.1-5.3).

The clock of a swap list numbers the program's outermost operators; an operator's number is its place. Operators inside
of an outermost one, and operators without gradients after it, have the same place. Code after the program, such as the
optimizer, has one more place. Operators request memory while they run, but tensors are offloaded and prefetched only
between two outermost operators.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from memplug.profile.operator_names import COLLECTIVES
from memplug.profile.trace import Trace
from memplug.swap.plan.problem import FROM_THE_BEGINNING, Candidate, SwapProblem

NO_PART = -1
"""Depth of an operator outside of the program that is not memplug's own."""


class LinkLoad(NamedTuple):
    """Rates of the link in bytes per second while both directions run, and the link time that other copies take.

    `d2h_busy_s` and `h2d_busy_s` are the seconds during each outermost operator: float64[n], or one number for all.
    """

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_busy_s: np.ndarray | float = 0.0
    h2d_busy_s: np.ndarray | float = 0.0


class Clock(NamedTuple):
    """The outermost operators of a step's program.

    Attributes:
        outermost: int64[n]: their indices in `Trace.operators`.
        now: int64[operators]: for each operator of the trace, the place of the outermost operator that is running, or
            ran last; 0 before the first.
        behind: index in `Trace.operators` of the first operator after the program; the length of that table if there is
            none.
    """

    outermost: np.ndarray
    now: np.ndarray
    behind: int

    @property
    def ticks(self) -> int:
        """Return how many outermost operators the program has, each a tick of the clock."""
        return len(self.outermost)

    @property
    def places(self) -> int:
        """Return the number of places: the ticks, and one more if anything runs after the program."""
        return self.ticks + (self.behind < len(self.now))


def clock_of(step: Trace) -> Clock:
    """Return the clock of one step."""
    depth = step.operators["depth"]
    outermost, outside = np.flatnonzero(depth == 0), np.flatnonzero(depth == NO_PART)
    behind = outside[np.searchsorted(outside, outermost[-1]) :] if len(outermost) else outside[:0]
    first = int(behind[0]) if len(behind) else len(depth)
    return Clock(outermost, np.maximum((depth == 0).cumsum() - 1, 0), first)


def swap_problem(
    step: Trace,
    link: LinkLoad,
    *,
    budget_bytes: int,
    host_bytes: int,
    min_bytes: int = 1,
    operator_s: np.ndarray | None = None,
    others: Collection[int] = (),
    states: bool = False,
    resident: Collection[int] = (),
) -> SwapProblem:
    """Return the swap problem of a step that exceeds a budget.

    Args:
        step: one step (see `memplug.profile.trace.cut`), recorded with tensors and without a swap list.
        link: rates of the link, and its other copies.
        budget_bytes: see `SwapProblem`.
        host_bytes: see `SwapProblem`.
        min_bytes: size of the smallest candidate.
        operator_s: float64[n]: duration of each place of the clock; None: all operators last equally long (Eq. 1).
        others: tensors, by index, that another technique decides on.
        states: see `gaps`.
        resident: see `gaps`.

    Returns:
        The problem. Its operators are the places of the clock; its candidates are the gaps in which an operator exceeds
        the budget.
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
    """Return equal seconds for all operators (Eq. 1), and 0 for code after the program: float64[places]."""
    clock = clock_of(step)
    return np.where(np.arange(clock.places) < clock.ticks, step.steps[0][2] / max(clock.ticks, 1), 0.0)


def in_use_bytes(step: Trace) -> np.ndarray:
    """Return the most device memory in use at each place of a step without a swap list (Figure 3). int64[n].

    Tensors that left because a request failed count as in use: the recording does not show that they left
    (memplug/profile/native/requests.h, `Moving`). Requests between two operators count towards the first of the two.
    """
    clock = clock_of(step)
    in_use = np.zeros(clock.places, np.int64)
    if not clock.ticks:
        return in_use
    running = np.maximum(step.events["operator"], 0)
    operator = np.where(running >= clock.behind, clock.ticks, clock.now[running])
    # As an operator begins, the bytes in use are those after the last event before it.
    before = np.searchsorted(operator, np.arange(clock.places))
    live = np.concatenate(([step.base_bytes], step.live_bytes))
    in_use[:] = live[before]
    np.maximum.at(in_use, operator, step.live_bytes)
    return in_use


def gaps(
    step: Trace, min_bytes: int, others: Collection[int] = (), states: bool = False, resident: Collection[int] = ()
) -> list[Candidate]:
    """Return each gap between two uses of a tensor in which an outermost operator runs, sorted by the two uses.

    Tensors of collectives have no gaps. Neither have tensors that existed before the step (their first use is not an
    output), unless `states` or `resident` includes them.

    Args:
        step: one step with tensors.
        min_bytes: size of the smallest tensor.
        others: indices of further tensors without gaps.
        states: True to include gradients, and tensors that live from step to step if the optimizer uses them. Each of
            the latter also has a gap from the step's beginning to its first use. The use after a gap may then lie
            outside of the program.
        resident: with `states`, indices of further tensors that live from step to step, such as frozen parameters. They
            have no gap at a step's beginning: only a use outside of the program could identify them then.
    """
    uses, now = step.uses, clock_of(step).now
    order = np.argsort(uses["tensor"], kind="stable")
    tensor, operator, output = (uses[column][order] for column in ("tensor", "operator", "output"))
    begins = np.concatenate(([True], tensor[1:] != tensor[:-1]))[: len(tensor)]
    # The step made a tensor if the first operator that uses it has it as an output only. With an input too, the tensor
    # existed before.
    first_operator = operator[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    wanted = step.tensors["nbytes"] >= max(min_bytes, 1)
    lasting = np.zeros(len(step.tensors), bool)
    lasting[tensor[(operator == first_operator) & ~output]] = True
    wanted[list(others)] = False
    # A collective's tensors are never swapped: other streams may use them until the program waits for the collective.
    collective = np.array([name.startswith(COLLECTIVES) for name in step.names], bool)
    wanted[tensor[collective[step.operators["name"][operator]]]] = False
    is_program = step.operators["depth"][operator] >= 0
    time = now[operator] + ~is_program  # a use outside of the program counts as one at the next place
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
    """Return the bytes of the largest tensor that a collective uses; steps free its memory at different times."""
    collective = np.array([name.startswith(COLLECTIVES) for name in step.names], bool)
    tensors = step.uses["tensor"][collective[step.operators["name"][step.uses["operator"]]]]
    return int(step.tensors["nbytes"][tensors].max(initial=0))


class FirstUse(NamedTuple):
    """Identifies a tensor that lives from step to step, by its first use outside of the program."""

    after: int
    """Place of the program's outermost operator that ran last before the use."""
    number: int
    """Number of the operator that uses the tensor, among all operators outside of the program since `after`."""
    slot: int
    """Number of the tensor among the operator's inputs."""
    tensor: int


def marks(step: Trace) -> list[FirstUse]:
    """Return, for tensors that existed before the step, the first read by an operator outside of the program.

    Reads before the program begins do not count.
    """
    clock = clock_of(step)
    begins = clock.outermost[0] if clock.ticks else len(step.operators)
    outside = begins + np.flatnonzero(step.operators["depth"][begins:] == NO_PART)
    after, at = np.unique(clock.now[outside], return_index=True)
    number_of = np.arange(len(outside)) - np.repeat(at, np.diff(at, append=len(outside)))
    place_of = dict(
        zip(outside.tolist(), zip(clock.now[outside].tolist(), number_of.tolist(), strict=True), strict=True)
    )
    first: dict[int, int] = {}  # for each tensor, the operator that uses it first
    lasting, slots, found = set(), dict.fromkeys(place_of, 0), {}
    for operator, tensor, output in step.uses.tolist():
        if first.setdefault(tensor, operator) == operator and not output:
            lasting.add(tensor)
        if operator in place_of and not output:
            if tensor in lasting and tensor not in found:
                found[tensor] = FirstUse(*place_of[operator], slots[operator], tensor)
            slots[operator] += 1
    return sorted(found.values())


def outside_of(step: Trace, after: int) -> list[int]:
    """Return the operators outside of the program between place `after` and the next, as indices into `Trace.names`."""
    here = (clock_of(step).now == after) & (step.operators["depth"] == NO_PART)
    here[: clock_of(step).outermost[after]] = False
    return step.operators["name"][here].tolist()
