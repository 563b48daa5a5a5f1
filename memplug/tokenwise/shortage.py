"""Makes all ranks swap fewer rows if the host memory of one rank runs out, and more rows once it has room again.

A rank that runs out of host memory recomputes the rows that it could not swap. Its results are right, but the other
ranks wait for it at every collective. So that rank asks for a smaller share of the rows that the plan swaps, and all
ranks use the smallest share that any rank asks for. A rank whose host memory had room to spare in a step asks for the
share that would have filled it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from memplug.errors import coded
from memplug.session.ranks import Ranks
from memplug.tokenwise.engine.executor import Executor

log = logging.getLogger("memplug")

MARGIN = 0.95  # ask for less than fits, by this factor: only whole rows are swapped, and the pool's slabs have gaps
SMALLEST = 0.01  # a smaller share counts as 0, since not even inputs and attention outputs fit
LEAST_RISE = 1.02  # do not raise the share by a smaller factor: it would gain next to nothing


class Shortage:
    """Sets `executor.flow.share`, the share of the planned rows to swap.

    Called at the end of the same steps on all ranks.
    """

    def __init__(self, executor: Executor, ranks: Ranks):
        self._executor = executor
        self._ranks = ranks
        self._before = self._counts()
        self._agreed: Callable[[], float] | None = None
        self._lowest = 1.0

    def end_step(self) -> None:
        """Ask for the share that would have been right for the step that ended.

        The ranks agree on a share while the next step runs, and use it from the step after that.
        """
        flow = self._executor.flow
        asked = self._asked(flow.share)
        if self._agreed is not None:
            share = self._agreed()
            if share < min(flow.share, self._lowest) and self._ranks.first:
                text = (
                    "memplug: the host memory of a rank ran out: all ranks now swap %.0f %% of the rows that the plan "
                    'swaps, and recompute the rest. Raise "host_budget_gib" if the hosts have more'
                )
                log.warning(coded("MP017", text), 100 * share)
            flow.share = share
            self._lowest = min(self._lowest, share)
        self._agreed = self._ranks.least(flow.share if asked is None else asked)

    def skip_step(self) -> None:
        """Start over after a step without a plan, or with one that is only tried."""
        self._before, self._agreed = self._counts(), None
        self._executor.flow.share = 1.0
        self._executor.pool.take_peak_bytes()

    def _asked(self, share: float) -> float | None:
        """Return the share that would have been right for the step that ended; None if `share` was right."""
        before, self._before = self._before, self._counts()
        taken, refused = (now - then for now, then in zip(self._before, before, strict=True))
        pool = self._executor.pool
        peak_bytes = pool.take_peak_bytes()
        if refused:
            share *= MARGIN * taken / (taken + refused)
            return share if share >= SMALLEST else 0.0
        if not 0.0 < share < 1.0 or not peak_bytes:
            return None
        # scaling the share scales the peak by less, as some tensors are always swapped whole: the peak stays in budget
        larger = min(1.0, share * MARGIN * pool.budget_bytes / peak_bytes)
        return larger if larger > share * LEAST_RISE else None

    def _counts(self) -> tuple[int, int]:
        transfer = self._executor.transfer
        return transfer.offloaded_total_bytes, transfer.refused_bytes
