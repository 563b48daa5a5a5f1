"""How the ranks that train a model agree: they vote and read the result later, or gather objects and wait for them."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from memplug.errors import RanksError
from memplug.session.ballots import Ballots, meet
from memplug.torch_private import get_default_store

MADE_UP: set[str] = set()  # backends of groups whose other ranks do not exist, as in an estimate
LIMIT_S = 60.0  # how long a rank waits at the end of a step for another rank that has not ended it


class Ranks:
    """The ranks that train a model.

    All ranks call `vote`, `least` and `gather`, in the same order. Voting ends if a rank has waited too long for
    another, or another has detached or died: pending and later votes raise `RanksError`. It ends at the same vote on
    all ranks, unless torch's store is gone (see `may_differ`).

    Args:
        members: the ranks of the world that train the model; None for all of them.
    """

    def __init__(self, members: Sequence[int] | None = None) -> None:
        self._given = members
        self._ballots: Ballots | None = None
        self._is_closed = False
        self._timeout_s = 0.0  # 0 until the ranks have met, then the timeout of the default group

    @property
    def members(self) -> Sequence[int]:
        """Return the ranks of the world that train the model, in the order of the lists that `gather` returns."""
        if self._given is not None:
            return self._given
        return range(dist.get_world_size() if dist.is_initialized() else 1)

    @property
    def first(self) -> bool:
        """Return whether this is the first rank or the only process.

        If there is no process group, as before and after training, the launcher's RANK decides.
        """
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        return rank == (0 if self._given is None else self._given[0])

    @property
    def are_known(self) -> bool:
        """Return False while several processes train and this one has joined no process group, else True."""
        return dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1

    @property
    def rank(self) -> int:
        """Return the index of this process in `members`."""
        return 0 if self._alone else self.members.index(dist.get_rank())

    @property
    def are_made_up(self) -> bool:
        """Return whether the other ranks do not exist, as in an estimate; they then count as copies of this one."""
        return dist.is_initialized() and dist.get_backend() in MADE_UP

    def vote(self, mask: int) -> Callable[[], int]:
        """Cast a non-negative number; return a function that waits for the bitwise AND of all ranks' numbers."""
        return self._cast(mask, functools.partial(functools.reduce, operator.and_), mask)

    def least(self, value: float) -> Callable[[], float]:
        """Cast a number; return a function that waits for the smallest of all ranks' numbers."""
        return self._cast(value, min, value)

    def gather(self, value: Any, patient: bool = False) -> list[Any]:
        """Return the values that all ranks passed, in rank order.

        Args:
            value: this rank's value.
            patient: True to wait up to the default group's timeout, as other ranks may call this much later.
        """
        return self._cast(value, list, [value] * len(self.members), patient)()

    def close(self) -> None:
        """Stop voting for good; other ranks' later votes end too."""
        self._is_closed = True
        if self._ballots is not None:
            self._ballots.close()

    def part(self) -> None:
        """Announce that this rank is out of batches: if another ends a step before `rejoin`, voting ends at once."""
        if self._ballots is not None:
            self._ballots.part()

    def rejoin(self) -> None:
        """Announce that this rank ends steps again, after `part`."""
        if self._ballots is not None:
            self._ballots.rejoin()

    @property
    def may_differ(self) -> bool:
        """Return whether other ranks may act on a vote that this rank cannot read, since torch's store is gone."""
        return self._ballots is not None and self._ballots.torn

    def is_first_to_say(self) -> bool:
        """Return whether this rank is to report why voting ended: True on the first rank that calls this.

        True on every rank if the ranks never met, or if torch's store is gone.
        """
        return self._ballots is None or self._ballots.is_first_to_say()

    def _cast(
        self, value: Any, combine: Callable[[list[Any]], Any], alone: Any, patient: bool = False
    ) -> Callable[[], Any]:
        """Cast a ballot, or return `alone` at once if there are no other ranks."""
        if self._ballots is None:
            if self._alone or self.are_made_up:
                return lambda: alone
            self._meet()
        limit_s = self._timeout_s if patient else min(LIMIT_S, self._timeout_s / 2)
        return self._ballots.cast(value, combine, limit_s)

    def _meet(self) -> None:
        if self._is_closed:
            raise RanksError("the session is detached")
        store, rank = get_default_store(), dist.get_rank()
        self._timeout_s = store.timeout.total_seconds()
        try:
            self._ballots = Ballots(meet(store, list(self.members), rank, self._timeout_s))
        except RuntimeError as error:
            raise RanksError(f"torch's store is gone, with the rank that has it: {error}", code="MP010") from error

    @property
    def _alone(self) -> bool:
        return not dist.is_initialized() or len(self.members) == 1
