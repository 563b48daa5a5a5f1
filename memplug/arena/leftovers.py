"""Room for what leftovers displace: blocks that outlive their step although the plan did not know of it.

The native arena leaves the requests of such blocks to torch's allocator from the next step on
(native/leftovers.cpp), so that leftovers stay few. Yet each holds bytes that the plan has for others. Those get an
annex: as much memory as they have in use at once, beside the arena, for as long as there are leftovers.
"""

from __future__ import annotations

import numpy as np

from memplug.arena.arena import Arena, Counters
from memplug.arena.plan.part import AddressPlan
from memplug.arena.tables import Tables
from memplug.sizes import BLOCK_BYTES, rounded_up

SPARE_SHARE = 0.25  # of an annex, since its requests are placed as they come
CROWDED_STEPS = 3  # in a row in which it did not suffice, after which it is made larger
GROWTH = 1.5
MOST = 2.0  # times what they have in use at once


class LeftoverRoom:
    """The annex of one plan at a time.

    Args:
        arena: which has it.
    """

    def __init__(self, arena: Arena):
        self._arena = arena
        self.begin()

    def begin(self) -> None:
        """Starts anew: a plan was installed, and has no annex."""
        self._bytes = self._crowded_steps = 0
        self._refused = False

    def end_step(self, step: Counters, plan: AddressPlan, tables: Tables) -> bool:
        """Reserves or gives back, between two steps.

        Args:
            step: what the arena did in the step that is over.
            plan, tables: that it serves by.

        Returns:
            Whether the annex changed.
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


def displaced_bytes(plan: AddressPlan, tables: Tables, held: list[tuple[int, int]]) -> int:
    """Returns the most bytes that requests have in use at once whose planned bytes overlap the held ones.

    Args:
        plan, tables: of the requests.
        held: bytes [begin, end) of the part that is used again and again.
    """
    requests = tables.requests
    begins, ends = requests["offset"], requests["offset"] + requests["size"]
    displaced = np.zeros(len(requests), bool)
    for begin, end in held:
        displaced |= (begins < end) & (ends > begin)
    displaced &= requests["kept"] < 0
    buffers = plan.problem.buffers[tables.rows[displaced]]
    times = np.concatenate([buffers["upper"], buffers["lower"]])  # at one time, frees come first
    changes = np.concatenate([-buffers["size"], buffers["size"]])
    return int(changes[np.argsort(times, kind="stable")].cumsum().max(initial=0))
