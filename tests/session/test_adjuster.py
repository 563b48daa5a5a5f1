"""The stages of programs that take turns, on ranks whose technique is made up and that vote in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import reduce
from operator import and_
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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

    def __init__(self, meeting: Meeting):
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
    """

    def __init__(self, ranks: OneOf, communicates: bool = False, warmup_steps: int = 1):
        self.technique = MadeUp(ranks, communicates)
        self.adjuster = Adjuster(ProfilerConfig(warmup_steps=warmup_steps), self.technique, Stage.WARM_UP, ranks)
        self.under: list[str | None] = []

    @property
    def changes(self) -> list[tuple[int, Stage, int]]:
        """Return the history without the reasons, in which each rank tells of its own steps."""
        return [each[:3] for each in self.adjuster.history.changes]

    def step(self, kind: str, knows_inputs: bool = True) -> None:
        if knows_inputs:
            self.adjuster.begin(f"int64[{LENGTHS[kind]}]")
        self.under.append(self.technique.plans.get(self.technique.key))
        self.adjuster.end_step(len(self.under), Program(None, ((LENGTHS[kind],),)))

    def train(self, kinds: Sequence[str], knows_inputs: bool = True) -> None:
        for kind in kinds:
            self.step(kind, knows_inputs)


def alone(**options: Any) -> Rank:
    return Rank(OneOf(Meeting(1)), **options)


def together(kinds: Sequence[Sequence[str]], communicates: bool = False, knows_inputs: bool = True) -> list[Rank]:
    """Train ranks, each with its own kinds of batches; return them."""
    meeting = Meeting(len(kinds))
    ranks = [Rank(OneOf(meeting), communicates) for _ in kinds]
    errors: list[BaseException] = []

    def run(rank: Rank, own: Sequence[str]) -> None:
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


@pytest.mark.parametrize("pattern", ["AB", "AAB", "AAAB", "ABC"])
def test_each_program_is_planned_by_its_own_steps(pattern: str) -> None:
    rank = alone()
    rank.train(pattern * 20)
    indices = {kind: index for index, kind in enumerate(dict.fromkeys(pattern))}
    for kind, index in indices.items():
        own = [plan for plan, each in zip(rank.under, pattern * 20, strict=True) if each == kind]
        # two steps of warm-up, and then three of the search
        assert own[5:] == [f"plan of {index}"] * len(own[5:])
    assert rank.adjuster.replans == len(indices)


@pytest.mark.parametrize("pattern", ["AB", "AAB", "AAAB", "ABC", "AAAAAAAB"])
def test_programs_without_known_inputs_are_planned_by_their_order(pattern: str) -> None:
    rank = alone()
    rank.train(pattern * 20, knows_inputs=False)
    assert rank.adjuster.replans == len(set(pattern))
    last = rank.under[-len(pattern) :]
    indices = {kind: index for index, kind in enumerate(dict.fromkeys(pattern))}
    assert last == [f"plan of {indices[kind]}" for kind in pattern]


def test_step_under_other_settings_does_not_count_for_a_search() -> None:
    rank = alone()
    rank.train("AA")
    assert rank.adjuster.stage is Stage.GEN_POLICY
    rank.step("B", knows_inputs=False)
    assert rank.technique.tried == {rank.adjuster.programs[0]: 0}, "it ran as a step of the first program"
    rank.train("AAA")
    assert rank.adjuster.stage is Stage.STABLE and rank.adjuster.programs[1].stage is Stage.WARM_UP


def test_step_of_a_program_under_anothers_settings_does_not_count_for_its_search() -> None:
    rank = alone()
    rank.train("AABB", knows_inputs=False)
    first = rank.adjuster.programs[0]
    assert rank.technique.key is rank.adjuster.programs[1], "the order makes another step of B likely"
    rank.step("A", knows_inputs=False)
    assert rank.technique.tried[first] == 0
    rank.step("A")
    assert rank.technique.tried[first] == 1


def test_votes_are_read_late_only_while_no_program_is_searched_for() -> None:
    rank = alone()
    rank.train("AAAAAA")
    assert rank.adjuster.is_calm
    rank.train("BB")
    assert not rank.adjuster.is_calm, "the votes on the first of these two steps are read with the second's"
    rank.train("BBBA")
    assert rank.adjuster.replans == 2
    rank.step("A")
    assert rank.adjuster.is_calm


def test_program_that_comes_rarely_is_searched_for_although_votes_are_read_late() -> None:
    rank = alone()
    for _ in range(8):
        rank.train("A" * 60 + "B")
    assert rank.adjuster.replans == 2


def test_rank_that_communicates_turns_with_the_others_alone() -> None:
    rank = alone(communicates=True)
    rank.train("AAAAAAAA")
    assert rank.adjuster.begin("int64[200]") is True and rank.technique.key is rank.adjuster.programs[0]
    assert rank.adjuster.taken.running is None, "the inputs are larger, but the regions have to stay"


@pytest.mark.parametrize("communicates", [False, True])
@pytest.mark.parametrize("patterns", [("AB", "AB"), ("AAB", "ABB"), ("A", "AB"), ("ABC", "ACB")])
def test_ranks_agree_whatever_each_of_them_runs(patterns: tuple[str, str], communicates: bool) -> None:
    ranks = together([pattern * (120 // len(pattern)) for pattern in patterns], communicates)
    assert ranks[0].changes == ranks[1].changes
    pairs = {pair for pair in zip(*((pattern * 6)[:6] for pattern in patterns), strict=True)}
    assert [rank.adjuster.replans for rank in ranks] == [len(pairs)] * 2


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(*[st.sampled_from("ABC")] * 2), min_size=1, max_size=80), st.booleans(), st.booleans())
def test_random_turns_leave_ranks_in_agreement(
    pairs: list[tuple[str, str]], communicates: bool, knows_inputs: bool
) -> None:
    ranks = together(list(zip(*pairs, strict=True)), communicates, knows_inputs)
    one, other = (rank.adjuster for rank in ranks)
    assert ranks[0].changes == ranks[1].changes and one.replans == other.replans
    assert [each.stage for each in one.programs] == [each.stage for each in other.programs]
    assert one.programs.current.index == other.programs.current.index
