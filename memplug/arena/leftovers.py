"""The annex: memory for requests whose planned bytes a leftover holds.

A leftover is a block that outlives its step although the plan did not know. In later steps the native arena leaves the
same request to torch's allocator (native/leftovers.cpp), so leftovers stay few. Yet each occupies bytes that the plan
gives to other requests. The annex, memory beside the arena, serves these displaced requests while there are leftovers.
Its size is the most bytes that displaced requests have in use at once, plus `SPARE_SHARE`. If that stays too small, the
annex grows to at most `MOST` times those bytes. It is never larger than the arena's reused part (a step's blocks).
"""

from __future__ import annotations

import numpy as np

from memplug.arena.arena import Arena, Counters
from memplug.arena.plan.part import AddressPlan
from memplug.arena.tables import ArenaTables
from memplug.sizes import BLOCK_BYTES, rounded_up

SPARE_SHARE = 0.25  # of the bytes needed: an annex has no planned addresses, so it fragments
CROWDED_STEPS = 3  # consecutive steps in which the annex was too small, after which it grows
GROWTH = 1.5
MOST = 2.0  # largest annex, as a multiple of the most bytes that displaced requests have in use at once


class LeftoverRoom:
    """The annex of the plan in force.

    Args:
        arena: the arena that reserves it.
    """

    def __init__(self, arena: Arena):
        self._arena = arena
        self.begin()

    def begin(self) -> None:
        """Start without an annex, under a plan that was just installed."""
        self._bytes = self._crowded_steps = 0
        self._refused = False

    def end_step(self, step: Counters, plan: AddressPlan, tables: ArenaTables) -> bool:
        """Reserve, enlarge or release the annex between two steps.

        Args:
            step: counts of the step that just ended.
            plan: the plan in force.
            tables: the tables of that plan.

        Returns:
            True if the annex changed, or could not be reserved.
        """
        if not step.leftover_bytes:
            self._crowded_steps = 0
            return self._resize(0)
        self._crowded_steps = self._crowded_steps + 1 if step.occupied else 0
        if not step.occupied or self._refused:
            return False
        needed = displaced_bytes(plan, tables, self._arena.leftovers())
        wanted = (1 + SPARE_SHARE) * needed
        if self._crowded_steps >= CROWDED_STEPS:
            wanted = max(wanted, min(GROWTH * self._bytes, MOST * needed))
        wanted = min(rounded_up(int(wanted), BLOCK_BYTES), tables.reused_bytes)
        return wanted > self._bytes and self._resize(wanted)

    def _resize(self, nbytes: int) -> bool:
        if nbytes == self._bytes:
            return False
        reserved = self._arena.extend(nbytes)
        self._bytes, self._refused, self._crowded_steps = nbytes if reserved else 0, not reserved, 0
        return True


def displaced_bytes(plan: AddressPlan, tables: ArenaTables, held: list[tuple[int, int]]) -> int:
    """Return the most bytes that displaced requests have in use at once.

    Args:
        plan: the plan in force.
        tables: the tables of that plan.
        held: byte ranges [begin, end) of the arena's reused part that leftovers hold.
    """
    requests = tables.requests
    begins, ends = requests["offset"], requests["offset"] + requests["size"]
    displaced = np.zeros(len(requests), bool)
    for begin, end in held:
        displaced |= (begins < end) & (ends > begin)
    displaced &= requests["kept"] < 0
    buffers = plan.problem.buffers[tables.rows[displaced]]
    times = np.concatenate([buffers["upper"], buffers["lower"]])  # at equal times, frees come before mallocs
    changes = np.concatenate([-buffers["size"], buffers["size"]])
    return int(changes[np.argsort(times, kind="stable")].cumsum().max(initial=0))
