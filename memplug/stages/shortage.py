"""Where the host memory of one rank runs out, all ranks swap less, together.

A rank that is short recomputes what it could not swap, which is right but makes the others wait for it at every
collective. So it asks for a smaller share of the rows, and all ranks take the smallest share that one asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from memplug.execute.tokenwise import Executor
from memplug.stages.ranks import Ranks

log = logging.getLogger("memplug")

MARGIN = 0.95  # of what fitted: rows are cut to whole ones, and slabs do not fill exactly
SMALLEST = 0.01  # a share below counts as none: inputs and attention outputs alone do not fit


class Shortage:
    """Called at the end of the same steps on all ranks.

    Args:
        executor: whose `share` is lowered, never raised.
        ranks: who agree.
    """

    def __init__(self, executor: Executor, ranks: Ranks):
        self._executor = executor
        self._ranks = ranks
        self._before = self._counts()
        self._agreed: Callable[[], float] | None = None

    def end_step(self) -> None:
        """A step is over; what it asks for is agreed while the next one runs, and counts from the one after."""
        executor = self._executor
        if self._agreed is not None:
            share = self._agreed()
            if share < executor.share and self._ranks.first:
                log.warning(
                    "memplug: the host memory of a rank ran out: all ranks swap %.0f %% of the rows that were to be "
                    'swapped, and recompute the rest; "host_budget_gib" says what they may use',
                    100 * share,
                )
            executor.share = min(share, executor.share)
        self._agreed = self._ranks.least(self._asked())

    def skip_step(self) -> None:
        """A step is over whose plan was only tried."""
        self._before, self._agreed = self._counts(), None

    def _asked(self) -> float:
        taken, refused = self._counts()
        taken, refused = taken - self._before[0], refused - self._before[1]
        self._before = self._counts()
        if not refused or not self._executor.share:
            return self._executor.share
        share = self._executor.share * MARGIN * taken / (taken + refused)
        return share if share >= SMALLEST else 0.0

    def _counts(self) -> tuple[int, int]:
        transfer = self._executor.transfer
        return transfer.offloaded_total_bytes, transfer.refused_bytes
