"""How the ranks that train a model agree: votes, which training does not wait for, and objects."""

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

MADE_UP: set[str] = set()  # backends of groups whose other ranks are not there
LIMIT_S = 60.0  # that a rank waits at the end of a step for one that has not ended it


class Ranks:
    """Every method but `close`, `part` and `rejoin` is called by all ranks, in the same order.

    A rank that waits too long for another one, or casts a vote that another one, which has detached or died, does not,
    gets a `RanksError`, from then on in every call; the last votes that counted are the same ones on all ranks.

    Args:
        members: the ranks of the world that train the model; None: all of them.
    """

    def __init__(self, members: Sequence[int] | None = None) -> None:
        self._given = members
        self._ballots: Ballots | None = None
        self._is_closed = False
        self._timeout_s = 0.0  # of the default group, once they have met

    @property
    def members(self) -> Sequence[int]:
        """Ranks of the world, in the order of what they `gather`."""
        if self._given is not None:
            return self._given
        return range(dist.get_world_size() if dist.is_initialized() else 1)

    @property
    def first(self) -> bool:
        """Whether this is the first rank, or the only process; where no group is there (yet, or any more), as launchers
        say.
        """
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        return rank == (0 if self._given is None else self._given[0])

    @property
    def are_known(self) -> bool:
        """False: a launcher has started several processes, and they have not joined yet."""
        return dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1

    @property
    def rank(self) -> int:
        """Of this process, among those that `gather`."""
        return 0 if self._alone else self.members.index(dist.get_rank())

    @property
    def are_made_up(self) -> bool:
        """The others are not there: what they have is what this one has, in an estimate."""
        return dist.is_initialized() and dist.get_backend() in MADE_UP

    def vote(self, mask: int) -> Callable[[], int]:
        """Start the bitwise and of a non-negative number over all ranks; returns what waits for the result."""
        return self._cast(mask, functools.partial(functools.reduce, operator.and_), mask)

    def least(self, value: float) -> Callable[[], float]:
        """Start the minimum of a number over all ranks; returns what waits for the result."""
        return self._cast(value, min, value)

    def gather(self, value: Any, patient: bool = False) -> list[Any]:
        """What every rank passed, in rank order.

        Args:
            patient: a rank may have much to do before it passes something, and does so for certain.
        """
        return self._cast(value, list, [value] * len(self.members), patient)()

    def close(self) -> None:
        """This rank takes part in nothing any more."""
        self._is_closed = True
        if self._ballots is not None:
            self._ballots.close()

    def part(self) -> None:
        """This rank ends no steps until `rejoin`; that others do so meanwhile ends the votes of all, at once."""
        if self._ballots is not None:
            self._ballots.part()

    def rejoin(self) -> None:
        """This rank ends steps again."""
        if self._ballots is not None:
            self._ballots.rejoin()

    @property
    def may_differ(self) -> bool:
        """Whether others may act on a vote that this rank does not know of: torch's store is gone."""
        return self._ballots is not None and self._ballots.torn

    def is_first_to_say(self) -> bool:
        """Whether no other rank has said yet why there are no more votes."""
        return self._ballots is None or self._ballots.is_first_to_say()

    def _cast(
        self, value: Any, combine: Callable[[list[Any]], Any], alone: Any, patient: bool = False
    ) -> Callable[[], Any]:
        """`alone`: the result where there are no others."""
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
