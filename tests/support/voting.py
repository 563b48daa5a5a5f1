"""Sessions' stages on ranks whose technique is made up, and that vote in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import reduce
from operator import and_
from typing import Any

from memplug.block import ProfilerConfig
from memplug.profile.similarity import Program
from memplug.session.adjuster import Adjuster
from memplug.session.table import Stage

TRIES = 3
LENGTHS = {"A": 100, "B": 200, "C": 300}
LIMIT_S = 20.0


class Meeting:
    """The ballots of ranks that are threads of this process: all ranks cast the same ballots in the same order."""

    def __init__(self, ranks: int):
        self._cast: list[list[Any]] = []
        self._ranks, self._changed = ranks, threading.Condition()

    def cast(self, number: int, value: Any) -> None:
        with self._changed:
            while len(self._cast) <= number:
                self._cast.append([])
            self._cast[number].append(value)
            self._changed.notify_all()

    def read(self, number: int) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._cast[number]) == self._ranks, LIMIT_S), "a rank is missing"
            return self._cast[number]


class OneOf:
    """A rank of a meeting."""

    first = False

    def __init__(self, meeting: Meeting, ranks: int):
        self.members = range(ranks)
        self._meeting, self._number = meeting, -1

    def vote(self, mask: int) -> Callable[[], int]:
        number = self._count(("vote", mask))
        return lambda: reduce(and_, self._same(number, "vote"))

    def gather(self, value: Any) -> list[Any]:
        return self._same(self._count(("gather", value)), "gather")

    def _count(self, value: Any) -> int:
        self._number += 1
        self._meeting.cast(self._number, value)
        return self._number

    def _same(self, number: int, kind: str) -> list[Any]:
        read = self._meeting.read(number)
        assert {each for each, _ in read} == {kind}, "ranks call the same collectives in the same order"
        return [value for _, value in read]


class MadeUp:
    """A technique that finds a plan for a program after some of its steps; ranks exchange values at each of them."""

    outcome, detail, may_keep = "", None, True

    def __init__(self, ranks: OneOf, communicates: bool):
        self.ranks, self.communicates = ranks, communicates
        self.key: Any = None
        self.tried: dict[Hashable, int] = {}
        self.plans: dict[Hashable, str] = {}

    def turn(self, key: Hashable) -> None:
        self.key = key

    @property
    def is_free(self) -> bool:
        return not self.communicates

    def turn_freely(self, key: Hashable) -> bool:
        if not self.communicates:
            self.key = key
        return not self.communicates

    def propose(self, trace: None) -> None:
        self.tried[self.key] = 0

    def advance(self, step: int) -> str | None:
        assert len(set(self.ranks.gather((step, self.key.index)))) == 1
        self.tried[self.key] += 1
        return f"plan of {self.key.index}" if self.tried[self.key] == TRIES else None

    def install(self, part: str) -> None:
        self.plans[self.key] = part

    def withdraw(self) -> None:
        self.plans.pop(self.key, None)

    def forget(self, key: Hashable) -> None:
        self.plans.pop(key, None)
        self.tried.pop(key, None)

    def judge(self, part: str) -> str:
        return ""

    def in_words(self, part: str) -> str:
        return part

    def retain(self, parts: Iterable[str]) -> None:
        assert all(parts)

    def has_lost_room(self) -> bool:
        return False


class Rank:
    """One rank in training.

    Attributes:
        under: for each step, the plan that the step ran under; None without one.
        keys: for each step, the program whose plan or search it ran under; None: the safest setting.
    """

    def __init__(self, ranks: OneOf, communicates: bool = False, warmup_steps: int = 1):
        self.technique = MadeUp(ranks, communicates)
        self.adjuster = Adjuster(ProfilerConfig(warmup_steps=warmup_steps), self.technique, Stage.WARM_UP, ranks)
        self.under: list[str | None] = []
        self.keys: list[Any] = []

    @property
    def changes(self) -> list[tuple[int, Stage, int]]:
        """Return the history without the reasons, in which each rank tells of its own steps."""
        return [each[:3] for each in self.adjuster.history.changes]

    def step(self, kind: str | int, knows_inputs: bool = True) -> None:
        """Run a step of a kind that is unlike any other, or of a length, which is the only difference between steps."""
        length = LENGTHS.get(kind, kind)
        if knows_inputs:
            self.adjuster.begin(f"int64[{length}]")
        self.under.append(self.technique.plans.get(self.technique.key))
        self.keys.append(self.technique.key)
        self.adjuster.end_step(len(self.under), Program(None, ((length,),), nodes=length if kind in LENGTHS else 0))

    def train(self, kinds: Sequence[str | int], knows_inputs: bool = True) -> None:
        for kind in kinds:
            self.step(kind, knows_inputs)


def alone(**options: Any) -> Rank:
    return Rank(OneOf(Meeting(1), 1), **options)


def together(kinds: Sequence[Sequence[str | int]], communicates: bool = False, knows_inputs: bool = True) -> list[Rank]:
    """Train ranks, each with its own kinds of batches; return them."""
    meeting = Meeting(len(kinds))
    ranks = [Rank(OneOf(meeting, len(kinds)), communicates) for _ in kinds]
    errors: list[BaseException] = []

    def run(rank: Rank, own: Sequence[str | int]) -> None:
        try:
            rank.train(own, knows_inputs)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(ranks, kinds, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return ranks
