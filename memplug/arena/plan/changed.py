"""Changes a plan's problem for what recorded steps did not show; the changed problem has yet to be solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from memplug.arena.plan.dynamic import GROUP
from memplug.arena.plan.part import AddressPlan, DynamicSpace
from memplug.arena.plan.problem import Problem, live_bytes
from memplug.arena.plan.rooms import staircase
from memplug.profile.scaling import BOUNDED, CONSTANT, Inputs, value_of
from memplug.sizes import BLOCK_BYTES, rounded_up


def with_more_room(problem: Problem, share: float) -> Problem:
    """Return the problem with a room that is higher by this share of its bytes."""
    buffers, room = problem.buffers.copy(), problem.buffers["room"]
    buffers["size"][room] = rounded_up(np.ceil(buffers["size"][room] * (1 + share)).astype(np.int64), BLOCK_BYTES)
    return replace(problem, buffers=buffers)


def with_longer(problem: Problem, inputs: Inputs, margin_bytes: int = 0) -> Problem | None:
    """Return the problem of a step with larger inputs; None: its requests have no more bytes than planned.

    Rooms, and buffers whose sizes are no function of the inputs, grow as much as the buffer that grows most.

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
    growth = float((asked[longer] / table["size"][longer]).max())
    table["size"][longer] = asked[longer]
    unknown = table["room"] | (table["term"] == BOUNDED)
    table["size"][unknown] = rounded_up(np.ceil(table["size"][unknown] * growth).astype(np.int64), BLOCK_BYTES)
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


def with_longer_lives(problem: Problem, late: Sequence[Sequence[int]]) -> Problem:
    """Return the problem with lifetimes of late blocks twice as long as observed.

    Args:
        problem: of the plan.
        late: pairs of rows: a late buffer, and one that found its bytes still in use.
    """
    buffers, end = problem.buffers.copy(), int(problem.buffers["upper"].max())
    for row, other in late:
        lower, seen = int(buffers["lower"][row]), int(buffers["lower"][other]) + 1
        buffers["upper"][row] = max(min(2 * seen - lower, end), int(buffers["upper"][row]))
    return replace(problem, buffers=buffers)
