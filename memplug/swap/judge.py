"""The judge of a swap list: replays the list on the step that it was made from, and reports mistakes as sentences.

It shares no code with the planner, `swap/plan`, and reads the step from its trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from memplug.profile.trace import EventKind, Trace


class JudgedSwap(NamedTuple):
    """One swap of a tensor; its times are places, the numbers of the step's outermost operators.

    The tensor is offloaded after `last_use`, its memory is free for [release, prefetch), and it is back at `next_use`.
    If `last_use` is -1, the tensor exists as the step begins, and leaves then. If `next_use` equals the number of
    operators, the next use comes after the last operator.
    """

    tensor: int
    nbytes: int
    last_use: int
    release: int
    prefetch: int
    next_use: int


class JudgedTarget(Protocol):
    """A tensor of a swap list in a plan; see `memplug.swap.plan.part.Target`."""

    nbytes: int
    operator: str
    last_use: int
    release: int
    prefetch: int
    next_use: int
    key: int


class JudgedPart(Protocol):
    """A swap list in a plan; see `memplug.swap.plan.part.SwapPart`."""

    names: tuple[str, ...]
    program: tuple[int, ...]
    outside: tuple[tuple[int, tuple[int, ...]], ...]
    anchors: tuple[tuple[int, int, int], ...]
    targets: tuple[JudgedTarget, ...]
    host_bytes: int


class ListLimits(NamedTuple):
    """The limits that a list must keep to.

    Attributes:
        device_bytes, host_bytes: budgets.
        d2h_bytes_per_s, h2d_bytes_per_s: rates of the link.
        stall_s: seconds that the device waits for copies, as the plan predicts.
        operator_s: float64[n]: duration of each outermost operator without waits. If code runs after the program, the
            last element is the duration of that code.
        d2h_busy_s, h2d_busy_s: float64[n]: link time of other copies while each operator runs.
        others: tensors that another technique decides on.
    """

    device_bytes: int
    host_bytes: int
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    stall_s: float
    operator_s: np.ndarray
    d2h_busy_s: np.ndarray
    h2d_busy_s: np.ndarray
    others: Collection[int] = ()


def mistakes_of_swaps(swaps: Sequence[JudgedSwap], step: Trace, limits: ListLimits) -> Iterator[str]:
    """Yield the mistakes of a swap list; if there are none, the list is accepted.

    Every tensor must be one of the step and have the size in the list, and no other technique may decide on it. Each
    swap must lie between two consecutive uses of its tensor, and the swaps of a tensor must not overlap. No operator
    may exceed the device budget, host memory must hold all swapped tensors, and copies must fit the link with no more
    waiting than predicted.

    Args:
        swaps: the list.
        step: one step, recorded without swaps and with tensors.
        limits: see `ListLimits`.
    """
    is_outermost = step.operators["depth"] == 0
    place_of = np.maximum(np.add.accumulate(is_outermost, dtype=np.int64) - 1, 0)
    count = int(is_outermost.sum())
    # a use outside of the program counts as one at the next place
    used_at = place_of + (step.operators["depth"] < 0)
    # code after the program, such as the optimizer
    behind = (np.cumsum(is_outermost) == count) & (step.operators["depth"] == -1)
    place_of[int(behind.argmax()) if behind.any() else len(behind) :] = count
    misplaced = [
        sentence
        for number, swap in enumerate(swaps)
        for sentence in _of_one(number, swap, step, used_at, count, limits.others)
    ]
    yield from misplaced
    if misplaced:
        return
    yield from _twice_away(swaps)
    yield from _above_the_budget(swaps, step, place_of, count + bool(behind.any()), limits.device_bytes)
    swapped = sum(swap.nbytes for swap in swaps)
    if swapped > limits.host_bytes:
        yield f"{swapped} bytes are swapped, and the host has {limits.host_bytes} for them"
    yield from _late(swaps, limits)


def mistakes_of_places(part: JudgedPart) -> Iterator[str]:
    """Yield the mistakes of a list that can be found without the step that it was made from."""
    operators = len(part.program)
    keys = {key for place, _, key in part.anchors if place >= operators}
    beyond = [names for _, names in part.outside]
    if any(not 0 <= place < operators + sum(map(len, beyond)) for place, _, _ in part.anchors):
        yield "an anchor is at a place without an operator"
    for number, target in enumerate(part.targets):
        if target.nbytes <= 0:
            yield f"swap {number} has a size of {target.nbytes} bytes"
        if not -1 <= target.last_use < target.release < target.prefetch <= target.next_use <= operators:
            yield f"swap {number} is not in order: used, released, prefetched, used again"
        if target.last_use >= 0 and target.operator not in part.names:
            yield f"swap {number} has its last use by {target.operator}, which the program does not run"
        if target.last_use < 0 and target.key not in keys:
            yield f"swap {number} is offloaded as the step begins, and no anchor tells which tensor it is"
    if any(not 0 <= name < len(part.names) for name in (*part.program, *itertools.chain(*beyond))):
        yield "the program runs operators without a name"
    if sum(target.nbytes for target in part.targets) > part.host_bytes:
        yield f"{part.host_bytes} bytes of host memory are too few for the swapped tensors"


def _of_one(
    number: int, swap: JudgedSwap, step: Trace, used_at: np.ndarray, count: int, others: Collection[int]
) -> Iterator[str]:
    name = f"swap {number}"
    if not 0 <= swap.tensor < len(step.tensors):
        yield f"{name} names tensor {swap.tensor}, which the step does not have"
        return
    if swap.nbytes != step.tensors["nbytes"][swap.tensor] or swap.nbytes <= 0:
        yield f"{name} has a size of {swap.nbytes} bytes, but its tensor has {step.tensors['nbytes'][swap.tensor]}"
    if swap.tensor in others:
        yield f"{name} names a tensor that another technique decides on"
    if not -1 <= swap.last_use < swap.release < swap.prefetch <= swap.next_use <= count:
        yield f"{name} is not in order: used, released, prefetched, used again"
        return
    uses = step.uses[step.uses["tensor"] == swap.tensor]
    using = used_at[uses["operator"]]
    for what, operator in (("last", swap.last_use), ("next", swap.next_use)):
        if 0 <= operator < count and operator not in using:
            yield f"{name}: operator {operator}, its {what} use, does not use it"
    if swap.last_use < 0 and uses["output"][uses["operator"] == uses["operator"][:1]].all():
        yield f"{name} names a tensor that does not exist as the step begins"
    if ((using > swap.last_use) & (using < swap.next_use)).any():
        yield f"{name} names a tensor that is used while it is swapped"


def _twice_away(swaps: Sequence[JudgedSwap]) -> Iterator[str]:
    by_tensor = sorted(swaps, key=lambda swap: (swap.tensor, swap.last_use))
    for one, other in zip(by_tensor, by_tensor[1:], strict=False):
        if one.tensor == other.tensor and other.last_use < one.next_use:
            yield f"tensor {one.tensor} is offloaded again before it is back"


def _above_the_budget(
    swaps: Sequence[JudgedSwap], step: Trace, place_of: np.ndarray, places: int, budget_bytes: int
) -> Iterator[str]:
    """Yield a mistake if an operator exceeds the budget: replay the step's requests without the swapped tensors."""
    away = [0] * places
    for swap in swaps:
        for operator in range(swap.release, swap.prefetch):
            away[operator] += swap.nbytes
    worst, where = 0, -1
    in_use, at = int(step.base_bytes), 0
    sizes = step.requests["nbytes"]
    for event in step.events.tolist():
        kind, request, nbytes, _, operator = event[:5]
        operator = int(place_of[operator]) if operator >= 0 else -1
        # While an operator without requests runs, the bytes in use are those after the last event before it.
        for passed in range(at, min(max(operator, 0) + 1, len(away))):
            worst, where = max((worst, where), (in_use - away[passed], passed))
        at = max(at, operator, 0)
        if kind == EventKind.MALLOC:
            in_use += nbytes
        else:
            in_use -= int(sizes[request]) if request >= 0 else nbytes
        if at < len(away):
            worst, where = max((worst, where), (in_use - away[at], at))
    for passed in range(at + 1, len(away)):
        worst, where = max((worst, where), (in_use - away[passed], passed))
    if worst > budget_bytes:
        yield f"operator {where} has {worst} bytes in use, and the budget is {budget_bytes}"


def _late(swaps: Sequence[JudgedSwap], limits: ListLimits) -> Iterator[str]:
    """Yield a mistake if the copies due within some stretch of the step need more time than the link has there.

    A copy to the host is due between the end of the last use and the release; a copy to the device is due between the
    prefetch and the next use. The judge grants each stretch the time in which the link is free. It also grants all the
    waiting that the plan predicts for the step, since all of it may fall into this stretch. So the judge refuses no
    possible list, but may accept one that needs slightly more time than there is.
    """
    begin_s = [0.0, *np.cumsum(limits.operator_s).tolist()]
    directions = (
        (
            "to the host",
            limits.d2h_bytes_per_s,
            limits.d2h_busy_s,
            [(s.last_use + 1, s.release, s.nbytes) for s in swaps],
        ),
        (
            "to the device",
            limits.h2d_bytes_per_s,
            limits.h2d_busy_s,
            [(s.prefetch, s.next_use, s.nbytes) for s in swaps],
        ),
    )
    for name, bytes_per_s, busy_s, copies in directions:
        free_s = [0.0, *np.cumsum(np.maximum(limits.operator_s - busy_s, 0.0)).tolist()]
        by_end = sorted(copies, key=lambda copy: copy[1])
        for start in sorted({copy[0] for copy in copies}):
            needed = 0
            for first, end, nbytes in by_end:
                if first >= start:
                    needed += nbytes
                    has_s = free_s[end] - free_s[start] + limits.stall_s
                    if needed / bytes_per_s > has_s + 1e-6 * begin_s[-1]:
                        takes_s = needed / bytes_per_s
                        yield f"copies {name} take {takes_s:g} s, operators {start} to {end} have {has_s:g} s for them"
                        return
