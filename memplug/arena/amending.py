"""Watches where steps show that a plan falls short, and amends it, without a new recording."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from memplug.arena.arena import Arena, Counters
from memplug.arena.plan.changed import with_dynamic, with_lives, with_longer, with_more_room
from memplug.arena.plan.part import AddressPlan
from memplug.arena.plan.problem import Problem
from memplug.arena.tables import ArenaTables
from memplug.profile.scaling import Inputs


class Shortfall(enum.Enum):
    """Reasons for which a plan is amended."""

    LIVES = "blocks lived at other times"
    ROOM = "dynamic requests lacked room"
    SIZES = "requests had other sizes"
    LENGTHS = "inputs were larger"


MISMATCHED_SHARE = 0.01
"""A step runs another program than the plan's if more than this share of its requests do not fit the plan."""

MOST_AMENDMENTS = 16
"""One plan may be amended so often for each kind of shortfall."""

MISSED_SHARE = 0.002
"""A step lacks room if more than this share of its dynamic requests' bytes finds none."""

MISSED_STEPS = 2
"""After so many steps that lack room, the room grows."""

MOST_GROWTH = 0.05
"""The room grows by at most this share of its bytes at once, or by the largest request that found none."""


class Lack:
    """Counts the steps whose dynamic requests lacked room, since it grew last, and the bytes that found none."""

    def __init__(self) -> None:
        self._steps = self._most_bytes = self._largest_bytes = 0

    def end_step(self, step: Counters) -> None:
        """Count a step, by `dynamic_bytes`, `dynamic_missed_bytes` and `dynamic_missed_largest`."""
        missed = step.dynamic_missed_bytes
        if missed > MISSED_SHARE * (step.dynamic_bytes + missed):
            self._steps += 1
            self._most_bytes = max(self._most_bytes, missed)
            self._largest_bytes = max(self._largest_bytes, step.dynamic_missed_largest)

    @property
    def lasts(self) -> bool:
        """Return whether enough steps lacked room."""
        return self._steps >= MISSED_STEPS

    def with_more_room(self, problem: Problem) -> Problem:
        """Return the problem with a room for the bytes that found none, or for as many as it may grow by."""
        share = min(max(MOST_GROWTH * problem.room_bytes, self._largest_bytes), self._most_bytes) / problem.room_bytes
        return with_more_room(problem, share)


MOST_RESIZED = 0.25
"""If more than this share of a plan's requests have other sizes, another program runs: amending does not help."""


class Resized:
    """Collects the planned requests in whose stead others came, since the plan was installed.

    Attributes:
        largest: for each of these requests, an index into `ArenaTables.requests`, the most bytes that came.
    """

    def __init__(self) -> None:
        self.largest: dict[int, int] = {}
        self._steps = 0

    def end_step(self, step: Counters, resized: Iterable[tuple[int, int]]) -> None:
        """Note the requests of a step, as `Arena.resized` returns them.

        A step counts if they have more than `MISSED_SHARE` of the bytes of all planned requests.
        """
        resized = list(resized)
        nbytes = sum(size for _, size in resized)
        if nbytes > MISSED_SHARE * (step.planned_bytes + nbytes):
            self._steps += 1
            for row, size in resized:
                self.largest[row] = max(size, self.largest.get(row, 0))

    def lasts(self, requests: int) -> bool:
        """Return whether enough steps had such requests, and few of the plan's `requests` are among them."""
        return self._steps >= MISSED_STEPS and len(self.largest) <= MOST_RESIZED * requests


def has_unknown_sizes(problem: Problem, inputs: Inputs) -> bool:
    """Return whether inputs differ from the recorded ones in a dimension that was alike in all recorded steps."""
    recorded = problem.fingerprint.input_sizes
    inputs = inputs[: len(recorded)]
    vary = {dimension for term in problem.terms for dimension in term}
    return [*map(len, inputs)] == [*map(len, recorded)] and any(
        size != before and dimension not in vary
        for sizes, of_it in zip(inputs, recorded, strict=True)
        for dimension, (size, before) in enumerate(zip(sizes, of_it, strict=True))
    )


class Shortfalls:
    """Watches a plan and its amendments, from its installation on.

    Args:
        arena: the arena that serves by the plan.
    """

    def __init__(self, arena: Arena):
        self._arena = arena
        self._lack, self._resized = Lack(), Resized()

    def begin(self, plan: AddressPlan, tables: ArenaTables, amended: Mapping[Shortfall, int]) -> None:
        """Watch the plan that was just installed.

        Args:
            plan: the plan, or an amendment of the one before.
            tables: its tables.
            amended: how often it was amended for each kind of shortfall.
        """
        self._plan, self._tables, self._bytes = plan, tables, int(tables.requests["size"].sum())
        self._left = {kind: MOST_AMENDMENTS - amended[kind] for kind in Shortfall}

    def end_step(self, step: Counters) -> tuple[Shortfall, AddressPlan] | None:
        """Return where the plan falls short, and the plan with a problem that does not; None: nowhere.

        Args:
            step: counts of the step that ended.
        """
        plan, problem, rows = self._plan, self._plan.problem, self._tables.rows
        self._lack.end_step(step)
        if self._left[Shortfall.LIVES] and (longer := self._with_lives(step)) is not None:
            return Shortfall.LIVES, replace(plan, problem=longer)
        if self._left[Shortfall.ROOM] and self._lack.lasts and problem.room_bytes:
            larger, self._lack = self._lack.with_more_room(problem), Lack()
            return Shortfall.ROOM, replace(plan, problem=larger)
        unknown = step.unplanned + step.exceeding
        if unknown and len(problem.terms) > 1 and not has_unknown_sizes(problem, self._arena.inputs()):
            longer = with_longer(problem, self._arena.inputs(), self._arena.margin_bytes)
            if longer is not None:
                return (Shortfall.LENGTHS, replace(plan, problem=longer)) if self._left[Shortfall.LENGTHS] else None
        if step.unplanned:
            self._resized.end_step(step, self._arena.resized())
            if self._left[Shortfall.SIZES] and self._resized.lasts(problem.requests):
                largest = {int(rows[request]): nbytes for request, nbytes in self._resized.largest.items()}
                self._resized = Resized()  # its requests have other numbers in the amended plan
                return Shortfall.SIZES, with_dynamic(plan, largest)
        return None

    def _with_lives(self, step: Counters) -> Problem | None:
        """Return the problem with the lives that blocks had in a step, if some displaced requests; else None.

        Another thread may have freed a block later than in the recorded step, such as one of a collective's back end.
        Or requests came in another order, such as prefetches, whose time depends on the inputs' sizes.
        """
        some = MISMATCHED_SHARE * (step.from_arena + step.mismatched)
        large = step.fallback_bytes > MISSED_SHARE * self._bytes  # what misses in a small step costs little
        is_open = step.unplanned <= some and not step.exceeding and (large or step.occupied > some)
        if not (step.occupied and is_open):
            return None
        return with_lives(self._plan.problem, self._tables.rows, *map(np.array, self._arena.lifetimes()))
