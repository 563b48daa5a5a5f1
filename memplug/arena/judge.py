"""The judge of addresses: checks a solution, or the arena's whole part of a plan. Shares no code with the planners.

The judge trusts that a problem is well-formed (positive sizes, lifetimes that end after they begin), and recomputes
everything else.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from operator import le, lt

import numpy as np

from memplug.arena.judge_sweep import first_clash
from memplug.arena.plan.part import AddressPlan, DynamicSpace
from memplug.arena.plan.problem import Problem, Solution

_FURTHEST = 2**62  # largest offset to which any size can be added in int64


class Fault(enum.Enum):
    """The kinds of mistakes in a solution or a plan."""

    NO_OFFSETS = "no offsets"  # the offsets are not a one-dimensional array of int64
    LEFT_OUT = "left out"  # the number of offsets is not the number of buffers
    NEGATIVE = "negative"
    MISALIGNED = "misaligned"
    BEYOND_ARENA = "beyond arena"
    BEYOND_CAPACITY = "beyond capacity"
    HEIGHT = "height"  # the height is not the end of the highest buffer
    OVERLAP = "overlap"  # two buffers are in use at once at the same bytes
    UNORDERED = "unordered"  # same bytes on two streams, and no ordering makes one stream wait for the other
    PREDICTION = "prediction"
    PLACE = "place"  # a buffer or a dynamic space has a phase or layer that the problem lacks
    WINDOW = "window"  # the lifetime of a dynamic space is empty
    GROUP = "group"  # a dynamic space has no requests
    SPACES = "spaces"  # a stretch of a dynamic space is empty, below 0, or not above the one before
    SPACE_BEYOND_ARENA = "space beyond arena"
    SPACE_IN_USE = "space in use"
    SCALE = "scale"  # a buffer's size is given as a function of the inputs, but is none


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One mistake that the judge found.

    Attributes:
        code: see `Fault`.
        message: a sentence with the names and values concerned.
        rows: rows of `Problem.buffers` that show the mistake; only the first if there are many.
    """

    code: Fault
    message: str
    rows: tuple[int, ...] = ()


def judge(problem: Problem, solution: Solution, capacity_bytes: int | None = None) -> tuple[Finding, ...]:
    """Return the mistakes in a solution; the judge accepts a solution without any.

    Every buffer must have an aligned offset inside the arena, and the arena must end where its highest buffer ends. Two
    buffers may share bytes only if one is freed before the other is requested; lifetimes are half-open. If the two are
    on different streams, an ordering or a chain of orderings must make the second stream wait for the first in between.
    The claim `optimal` is not checked.

    Args:
        problem: any layout problem.
        solution: the solution to check, however wrong.
        capacity_bytes: largest height allowed; None: no limit.
    """
    unusable = tuple(_unusable(problem, solution))
    if unusable:
        return unusable
    found = [*_placement(problem, solution)]
    if 0 <= solution.offsets.min(initial=0) and solution.offsets.max(initial=0) <= _FURTHEST:
        found += [*_heights(problem, solution, capacity_bytes), *_clashes(problem, solution)]
    return tuple(found)


def judge_addresses(plan: AddressPlan) -> tuple[Finding, ...]:
    """Return the mistakes in a plan's solution, predictions and dynamic spaces; empty: the plan is accepted."""
    unusable = tuple(_unusable(plan.problem, plan.solution))
    if unusable:
        return unusable
    return (
        *judge(plan.problem, plan.solution),
        *_places(plan),
        *_scales(plan.problem),
        *_predictions(plan),
        *_dynamic(plan),
    )


def mistakes_of(plan: AddressPlan) -> Iterator[str]:
    """Yield the findings of `judge_addresses` as sentences."""
    yield from (finding.message for finding in judge_addresses(plan))


def _unusable(problem: Problem, solution: Solution) -> Iterator[Finding]:
    """Yield mistakes that make all further checks impossible."""
    offsets, height = solution.offsets, solution.height
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.int64 or offsets.ndim != 1:
        kind = f"{offsets.dtype}{list(offsets.shape)}" if isinstance(offsets, np.ndarray) else type(offsets).__name__
        yield Finding(code=Fault.NO_OFFSETS, message=f"the offsets are {kind}, not an array of int64 in one dimension")
    elif len(offsets) != len(problem.buffers):
        message = f"there are {len(offsets)} offsets for {len(problem.buffers)} buffers"
        yield Finding(code=Fault.LEFT_OUT, message=message)
    if not isinstance(height, int | np.integer) or isinstance(height, bool) or height < 0:
        yield Finding(code=Fault.HEIGHT, message=f"the height is {height!r}, not a number of bytes")


def _placement(problem: Problem, solution: Solution) -> Iterator[Finding]:
    table, offsets = problem.buffers, solution.offsets
    faults = (
        (Fault.NEGATIVE, "below 0", offsets < 0),
        (Fault.MISALIGNED, "which is not a multiple of {alignment}", offsets % table["alignment"] != 0),
        (
            Fault.BEYOND_ARENA,
            "where its {size} bytes end beyond the arena of {height} bytes",
            offsets > min(solution.height, _FURTHEST) - table["size"],
        ),
    )
    for code, words, wrong in faults:
        rows = np.flatnonzero(wrong)
        if len(rows):
            row = int(rows[0])
            why = words.format(alignment=table["alignment"][row], size=table["size"][row], height=solution.height)
            message = f"buffer {problem.ids[row]} is at offset {offsets[row]}, {why}{more(len(rows))}"
            yield Finding(code=code, message=message, rows=(row,))


def _heights(problem: Problem, solution: Solution, capacity_bytes: int | None) -> Iterator[Finding]:
    ends = solution.offsets + problem.buffers["size"]
    rows = (int(ends.argmax()),) if len(ends) else ()
    highest = int(ends.max(initial=0))
    if solution.height > highest:
        message = f"the arena has {solution.height} bytes, and its highest buffer ends at {highest}"
        yield Finding(code=Fault.HEIGHT, message=message, rows=rows)
    height = max(int(solution.height), highest)
    if capacity_bytes is not None and height > capacity_bytes:
        message = f"the arena is {height - capacity_bytes} bytes higher than the capacity of {capacity_bytes} bytes"
        yield Finding(code=Fault.BEYOND_CAPACITY, message=message, rows=rows)


def _clashes(problem: Problem, solution: Solution) -> Iterator[Finding]:
    clash = first_clash(problem.buffers, solution.offsets, problem.orderings)
    if clash is None:
        return
    one, other = (problem.buffers[row] for row in clash)
    begin = max(int(solution.offsets[row]) for row in clash)
    end = min(int(solution.offsets[row]) + int(problem.buffers["size"][row]) for row in clash)
    lower, upper = max(one["lower"], other["lower"]), min(one["upper"], other["upper"])
    names = f"buffers {problem.ids[clash[0]]} and {problem.ids[clash[1]]}"
    if lower < upper:
        message = f"{names} both use bytes {begin} up to {end} from {lower} up to {upper}"
        yield Finding(code=Fault.OVERLAP, message=message, rows=clash)
    else:
        message = (
            f"{names} both use bytes {begin} up to {end}, and stream {other['stream']} has not waited for stream "
            f"{one['stream']} when it uses them"
        )
        yield Finding(code=Fault.UNORDERED, message=message, rows=clash)


def _places(plan: AddressPlan) -> Iterator[Finding]:
    for column in ("lower_phase", "upper_phase", "lower_layer", "upper_layer"):
        values, count = plan.problem.buffers[column], _count(plan.problem, column)
        rows = np.flatnonzero((values < -1) | (values >= count))
        if len(rows):
            row = int(rows[0])
            message = (
                f"buffer {plan.problem.ids[row]} has {column} {values[row]}, where the problem has {count}"
                f"{more(len(rows))}"
            )
            yield Finding(code=Fault.PLACE, message=message, rows=(row,))


def _scales(problem: Problem) -> Iterator[Finding]:
    if any(dimension < 0 for term in problem.terms for dimension in term):
        yield Finding(code=Fault.SCALE, message=f"the terms {shown(problem.terms)} name dimensions below 0")
    term, base, factor = (problem.buffers[name] for name in ("term", "base", "factor"))
    is_function = (term > 0) & (base >= 0) & (factor > 0)
    rows = np.flatnonzero(
        ~is_function & ((base != 0) | (factor != 0) | (term < -1) | (term > 0)) | (term >= len(problem.terms))
    )
    if len(rows):
        row = int(rows[0])
        message = (
            f"buffer {problem.ids[row]} requests {base[row]} + {factor[row]} times term {term[row]} of "
            f"{len(problem.terms)}{more(len(rows))}"
        )
        yield Finding(code=Fault.SCALE, message=message, rows=(row,))


def _predictions(plan: AddressPlan) -> Iterator[Finding]:
    peak, height, promised = _peak_bytes(plan.problem.buffers), plan.solution.height, plan.predictions
    of_groups = [group.peak_bytes for group in plan.dynamic]
    requested = _peak_bytes(plan.problem.buffers[~plan.problem.buffers["room"]])
    at_least = max(requested, promised.dynamic_peak_bytes)
    fragmentation = 1 - peak / height if height else 0.0
    for name, is_promised, least, most in (
        ("arena_bytes", promised.arena_bytes, height, height),
        ("static_peak_bytes", promised.static_peak_bytes, peak, peak),
        ("dynamic_peak_bytes", promised.dynamic_peak_bytes, max(of_groups, default=0), sum(of_groups)),
        ("live_peak_bytes", promised.live_peak_bytes, at_least, max(at_least, promised.live_peak_bytes)),
        ("fragmentation", promised.fragmentation, fragmentation, fragmentation),
    ):
        if not least <= is_promised <= most:
            expected = f"{least}" if least == most else f"from {least} to {most}"
            message = f"{name} is predicted to be {is_promised}, where the plan gives {expected}"
            yield Finding(code=Fault.PREDICTION, message=message)


def _dynamic(plan: AddressPlan) -> Iterator[Finding]:
    # Copied out of the table once, since there may be thousands of groups.
    lower, upper, rooms = (plan.problem.buffers[name].copy() for name in ("lower", "upper", "room"))
    for number, group in enumerate(plan.dynamic):
        name = f"dynamic space {number}"
        yield from _group(plan.problem, plan.solution.height, name, group)
        first, end = ([space[side] for space in group.spaces] for side in (0, 1))
        if min(first, default=0) < 0 or not all(map(lt, first, end)) or not all(map(le, end, first[1:])):
            yield Finding(code=Fault.SPACES, message=f"{name} has {shown(group.spaces)}: empty, below 0, or not rising")
        elif max(end, default=0) > min(plan.solution.height, _FURTHEST):
            message = f"{name} ends at {end[-1]}, beyond an arena of {plan.solution.height} bytes"
            yield Finding(code=Fault.SPACE_BEYOND_ARENA, message=message)
        else:
            rows = np.flatnonzero((lower < group.upper) & (upper > group.lower) & ~rooms)
            yield from _in_use(plan, name, np.array(first, np.int64), np.array(end, np.int64), rows)


def _group(problem: Problem, height: int, name: str, group: DynamicSpace) -> Iterator[Finding]:
    for column in ("malloc_phase", "malloc_layer", "free_phase", "free_layer"):
        count = _count(problem, column)
        if not -1 <= getattr(group, column) < count:
            message = f"{name} has {column} {getattr(group, column)}, where the problem has {count}"
            yield Finding(code=Fault.PLACE, message=message)
    mallocs = group.mallocs
    if not 0 <= group.lower < group.upper:
        yield Finding(code=Fault.WINDOW, message=f"{name} is there from {group.lower} up to {group.upper}: at no time")
    elif not (
        mallocs and group.lower <= mallocs[0] and mallocs[-1] < group.upper and all(map(lt, mallocs, mallocs[1:]))
    ):
        message = f"{name} makes requests at {shown(mallocs)}: none, outside of its time, or not rising"
        yield Finding(code=Fault.GROUP, message=message)
    if group.peak_bytes < 0 or group.stream < 0:
        message = f"{name} has stream {group.stream} and a peak of {group.peak_bytes} bytes: neither may be below 0"
        yield Finding(code=Fault.GROUP, message=message)
    if not 0 <= group.ceiling <= height:
        message = f"{name} has its ceiling at {group.ceiling}, outside of an arena of {height} bytes"
        yield Finding(code=Fault.SPACE_BEYOND_ARENA, message=message)


def _in_use(plan: AddressPlan, name: str, first: np.ndarray, end: np.ndarray, rows: np.ndarray) -> Iterator[Finding]:
    """Yield a finding if a buffer in `rows` overlaps one of the ranges of bytes [first, end)."""
    table, offsets = plan.problem.buffers, plan.solution.offsets[rows]
    # A buffer that overlaps any space overlaps the lowest one that ends above the buffer's offset.
    above = np.searchsorted(end, offsets, "right")
    wrong = np.flatnonzero(np.append(first, _FURTHEST)[above] < offsets + table["size"][rows])
    if len(wrong):
        row, at = int(rows[wrong[0]]), int(offsets[wrong[0]])
        message = (
            f"{name} has bytes of buffer {plan.problem.ids[row]}, which is at {at} up to {at + table['size'][row]} "
            f"from {table['lower'][row]} up to {table['upper'][row]}{more(len(wrong))}"
        )
        yield Finding(code=Fault.SPACE_IN_USE, message=message, rows=(row,))


def _peak_bytes(table: np.ndarray) -> int:
    """Return the most bytes in use at once; at equal times, frees come before mallocs."""
    order = np.argsort(np.concatenate([table["upper"], table["lower"]]), kind="stable")
    changes = np.concatenate([-table["size"], table["size"]])[order]
    return int(changes.cumsum().max(initial=0))


def _count(problem: Problem, column: str) -> int:
    return len(problem.phases) if column.endswith("_phase") else len(problem.layers)


def more(count: int) -> str:
    """Return " (and N more)" for a message that shows only the first of `count` findings, else ""."""
    return f" (and {count - 1} more)" if count > 1 else ""


def shown(value: object) -> str:
    """Return the value's `repr`, cut to 200 characters."""
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:197]}..."
