"""Where the host memory of one rank runs out, all ranks swap less, together; where it has room again, more.

A rank that is short recomputes what it could not swap, which is right but makes the others wait for it at every
collective. So it asks for a smaller share of the rows, and all ranks take the smallest share that one asks for. A rank
that had room to spare in a step asks for as much more as would have filled it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from memplug.errors import coded
from memplug.session.ranks import Ranks
from memplug.tokenwise.engine.executor import Executor

log = logging.getLogger("memplug")

MARGIN = 0.95  # of what fitted: rows are cut to whole ones, and slabs do not fill exactly
SMALLEST = 0.01  # a share below counts as none: inputs and attention outputs alone do not fit
LEAST_RISE = 1.02  # a smaller one would change what is swapped for next to nothing


class Shortage:
    """Called at the end of the same steps on all ranks; sets `share` of the executor's flow."""

    def __init__(self, executor: Executor, ranks: Ranks):
        self._executor = executor
        self._ranks = ranks
        self._before = self._counts()
        self._agreed: Callable[[], float] | None = None
        self._lowest = 1.0

    def end_step(self) -> None:
        """A step is over; what it asks for is agreed while the next one runs, and counts from the one after."""
        flow = self._executor.flow
        asked = self._asked(flow.share)
        if self._agreed is not None:
            share = self._agreed()
            if share < min(flow.share, self._lowest) and self._ranks.first:
                text = (
                    "memplug: the host memory of a rank ran out: all ranks swap %.0f %% of the rows that were to be "
                    'swapped, and recompute the rest. Raise "host_budget_gib" if the hosts have more'
                )
                log.warning(coded("MP017", text), 100 * share)
            flow.share = share
            self._lowest = min(self._lowest, share)
        self._agreed = self._ranks.least(flow.share if asked is None else asked)

    def skip_step(self) -> None:
        """A step is over that no plan, or one that was only tried, was made for: nothing is short yet."""
        self._before, self._agreed = self._counts(), None
        self._executor.flow.share = 1.0
        self._executor.pool.take_peak_bytes()

    def _asked(self, share: float) -> float | None:
        """What the step should have run at, which ran at `share`; None: that was right."""
        before, self._before = self._before, self._counts()
        taken, refused = (now - then for now, then in zip(self._before, before, strict=True))
        pool = self._executor.pool
        peak_bytes = pool.take_peak_bytes()
        if refused:
            share *= MARGIN * taken / (taken + refused)
            return share if share >= SMALLEST else 0.0
        if not 0.0 < share < 1.0 or not peak_bytes:
            return None
        # no more than fits: what is swapped whole does not grow with the share
        larger = min(1.0, share * MARGIN * pool.budget_bytes / peak_bytes)
        return larger if larger > share * LEAST_RISE else None

    def _counts(self) -> tuple[int, int]:
        transfer = self._executor.transfer
        return transfer.offloaded_total_bytes, transfer.refused_bytes
