"""Changes a plan's problem for what recorded steps did not show; the changed problem has yet to be solved."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from memplug.arena.plan.dynamic import GROUP
from memplug.arena.plan.part import AddressPlan, DynamicSpace
from memplug.arena.plan.problem import Problem, live_bytes
from memplug.arena.plan.rooms import staircase
from memplug.profile.records import Pass
from memplug.profile.scaling import BOUNDED, CONSTANT, Inputs, value_of
from memplug.sizes import BLOCK_BYTES, rounded_up


def with_more_room(problem: Problem, share: float) -> Problem:
    """Return the problem with a room that is higher by this share of its bytes."""
    buffers, room = problem.buffers.copy(), problem.buffers["room"]
    buffers["size"][room] = rounded_up(np.ceil(buffers["size"][room] * (1 + share)).astype(np.int64), BLOCK_BYTES)
    return replace(problem, buffers=buffers)


def with_longer(problem: Problem, inputs: Inputs, margin_bytes: int = 0) -> Problem | None:
    """Return the problem of a step with larger inputs; None: its requests have no more bytes than planned.

    A buffer whose size is no function of the inputs grows by the total growth of its micro-batch; between two passes,
    by that of the next one if it is larger. A room grows as the largest micro-batch does.

    Args:
        problem: whose sizes follow from the inputs.
        inputs: of the step.
        margin_bytes: bytes that follow each buffer.
    """
    table = problem.buffers.copy()
    value = np.zeros(len(table), np.int64)
    for number, sizes in enumerate(inputs):
        of_it = problem.micro_batch == number
        value[of_it] = np.array([value_of(term, sizes) for term in problem.terms])[np.maximum(table["term"][of_it], 0)]
    asked = rounded_up(table["base"] + table["factor"] * value, BLOCK_BYTES) + margin_bytes
    longer = (table["term"] > CONSTANT) & (asked > table["size"])
    if not longer.any():
        return None
    follow, of_it = table["term"] > CONSTANT, problem.micro_batch + 1
    before = np.bincount(of_it[follow], table["size"][follow], of_it.max() + 2)
    table["size"][longer] = asked[longer]
    after = np.bincount(of_it[follow], table["size"][follow], len(before))
    growths = np.maximum(after / np.maximum(before, 1), 1)
    kinds = np.array([int(phase.kind) for phase in problem.phases] or [0])[table["lower_phase"]]
    growth = np.maximum(growths[of_it], growths[of_it + (kinds == Pass.OTHER)])
    growth[table["room"]] = after.max() / before.max()
    unknown = table["room"] | (table["term"] == BOUNDED)
    grown = np.ceil(table["size"] * growth).astype(np.int64)
    table["size"][unknown] = rounded_up(grown[unknown], BLOCK_BYTES)
    return replace(problem, buffers=table)


def with_dynamic(plan: AddressPlan, largest: Mapping[int, int]) -> AddressPlan:
    """Return the plan with some of its requests made dynamic, and a larger room; its addresses are still to be made.

    Args:
        plan: the plan in force.
        largest: for rows of the plan's problem, the most bytes that their requests had in other steps.
    """
    problem, rows = plan.problem, np.array(sorted(largest))
    table = problem.buffers[rows]
    table["size"] = np.maximum(
        table["size"], rounded_up(np.array([largest[row] for row in rows.tolist()]), BLOCK_BYTES)
    )
    rooms = np.concatenate([problem.buffers[problem.buffers["room"]], table])
    stays = ~problem.buffers["room"]
    stays[rows] = False
    begins, height = live_bytes(rooms)
    rectangles = staircase(height[:-1], begins, problem.main_stream)
    peak_bytes = plan.predictions.dynamic_peak_bytes + int(live_bytes(table)[1].max())
    return replace(
        plan,
        problem=problem.part(np.flatnonzero(stays)).with_more(rectangles),
        dynamic=_joined(plan.dynamic, table),
        predictions=replace(plan.predictions, dynamic_peak_bytes=peak_bytes),
    )


def _joined(groups: Sequence[DynamicSpace], table: np.ndarray) -> tuple[DynamicSpace, ...]:
    """Return the groups, and those of more requests, given as buffers, which live exactly as long as recorded."""
    places = "lower_phase", "lower_layer", "upper_phase", "upper_layer", "stream"
    of_key = {tuple(getattr(group, name) for name in GROUP): group for group in groups}
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, key in enumerate(table[list(places)].tolist()):
        rows.setdefault(key, []).append(row)
    for key, of_it in rows.items():
        buffers, known = table[of_it], of_key.get(key)
        mallocs = buffers["lower"].tolist()
        lower, upper, peak_bytes = min(mallocs), int(buffers["upper"].max()), int(live_bytes(buffers)[1].max())
        if known is not None:
            mallocs, peak_bytes = [*known.mallocs, *mallocs], known.peak_bytes + peak_bytes
            lower, upper = min(lower, known.lower), max(upper, known.upper)
        of_key[key] = DynamicSpace(
            **dict(zip(GROUP, key, strict=True)),
            lower=lower,
            upper=upper,
            spaces=(),
            mallocs=tuple(sorted(mallocs)),
            peak_bytes=peak_bytes,
            ceiling=known.ceiling if known is not None else 0,
        )
    return tuple(of_key[key] for key in sorted(of_key))


def with_lives(problem: Problem, rows: np.ndarray, came: np.ndarray, freed: np.ndarray) -> Problem | None:
    """Return the problem with buffers that live as they did in another step too; None if nothing changes.

    Requests of the other step may have come in another order. The longest increasing subsequence, of requests that kept
    to the problem's order, is the clock; the others' lives are lengthened until they are in use whenever they were.

    Args:
        problem: its buffers have the order of requests.
        rows: the requests' buffers. int64[n].
        came: number of these requests that had come before each of them; -1: it did not come. int64[n].
        freed: number of these requests that had come when its block was freed; more than n: it was not; -1: it had no
            block. int64[n].
    """
    in_turn = rows[np.argsort(came)][(came < 0).sum() :]
    if not in_turn.size:
        return None
    table, end = problem.buffers.copy(), int(problem.buffers["upper"].max())
    times = np.maximum.accumulate(np.where(table["outlives"], 0, table["lower"]))
    clock = np.zeros(len(in_turn) + 1, np.int64)
    keeps = _increasing(in_turn)
    clock[keeps + 1] = times[in_turn[keeps]]
    clock = np.maximum.accumulate(clock)
    table["lower"][in_turn] = np.minimum(table["lower"][in_turn], clock[1:])
    table["upper"][in_turn] = np.maximum(table["upper"][in_turn], clock[1:] + 1)
    upper = np.where(freed < len(clock), clock[np.minimum(freed, len(in_turn))] + 1, end)
    table["upper"][rows] = np.maximum(table["upper"][rows], np.where(freed < 0, 0, upper))
    return replace(problem, buffers=table) if (table != problem.buffers).any() else None


def _increasing(values: np.ndarray) -> np.ndarray:
    """Return the indices of a longest increasing subsequence. int64."""
    if (np.diff(values) > 0).all():
        return np.arange(len(values))
    least: list[int] = []  # by length, the least last value of the subsequences so far
    last: list[int] = []  # its index
    before = np.full(len(values), -1)
    for index, value in enumerate(values.tolist()):
        length = bisect.bisect_left(least, value)
        before[index] = last[length - 1] if length else -1
        least[length : length + 1], last[length : length + 1] = [value], [index]
    found, index = [], last[-1] if last else -1
    while index >= 0:
        found.append(index)
        index = int(before[index])
    return np.array(found[::-1], np.int64)
