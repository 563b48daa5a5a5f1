"""The stages of programs that take turns, on ranks whose technique is made up and that vote in this process."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplug.session.table import Stage
from tests.support.voting import alone, together


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
