"""Programs that differ in nothing but sizes: which sizes each is made for, and under whose plan a step runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplug.profile.similarity import Program, related
from memplug.session import families
from memplug.session import programs as programs_module
from memplug.session.inputs import growth_of
from memplug.session.programs import BAND, FIRST_BELOW, Programs
from memplug.session.table import Stage
from tests.support.voting import Rank, alone, together

TOLERANCE = 1.05
LENGTHS = st.integers(1, 2000)


def step(*forwards: int) -> Program:
    """Return a step of one region whose forwards have inputs of these bytes."""
    return Program(None, (forwards,))


class Gathers:
    """The ranks of a session, of which all but the first return these values."""

    def __init__(self, *others: Any):
        self._others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, *(other(value) for other in self._others)]


def family(*sizes: int) -> Programs:
    """Return the programs of a family, each made for steps of a size, in this order; all have plans."""
    programs = Programs(0.05, 0.95)
    for size in sizes:
        one = programs.remember(step(size), "a run:0", size / sizes[0])
        one.stage, one.decisions = Stage.STABLE, f"plan for {size}"
        programs.enter(one)
    return programs


def voted(programs: Programs, *forwards: int) -> tuple[list[int], list[int]]:
    """Return the programs that a step fits, and those of them that are made for larger steps."""
    mask = programs.vote(step(*forwards))
    fits, below = ([one.index for one in programs if mask >> first + one.index & 1] for first in (0, FIRST_BELOW))
    return fits, below


def test_step_is_as_large_as_its_largest_forward_makes_it() -> None:
    assert step(4, 8).over(step(8, 8)) == 1.0 and step(4, 8).over(step(4, 4)) == 2.0
    assert step(4, 8).is_mixed and not step(8, 8).is_mixed
    assert Program(None, ((0,),)).over(step(1)) is None
    hidden = Program(None, ((8,), ()), unseen=frozenset({1}))
    assert hidden.over(Program(None, ((4,), (4,)))) == 2.0
    assert related(step(4), step(400), 0.05, 0.95) and not related(step(4), step(4, 4), 0.05, 0.95)


def test_step_fits_every_program_for_steps_at_least_as_large() -> None:
    programs = family(100, 400, 200)
    assert voted(programs, 104) == ([0, 1, 2], [1, 2])
    assert voted(programs, 150) == ([1, 2], [1])
    assert voted(programs, 210) == ([1, 2], [1])
    assert voted(programs, 300) == ([1], [])
    assert voted(programs, 500) == ([], [])
    assert voted(programs, 50, 52) == ([], []), "another number of forwards is another program"


def test_empty_step_fits_every_program_of_its_family() -> None:
    programs = family(100, 400)
    assert voted(programs, 0) == ([0, 1], [])
    rank = alone()
    rank.train([100] * 6 + [0, 100, 0, 0, 100])
    assert len(rank.adjuster.programs) == 1 and all(rank.under[6:])
    ranks = together([[100, 200, 0, 150] * 20, [0, 100, 100, 0] * 20])
    assert all(len(rank.adjuster.programs) <= 4 and all(rank.under[60:]) for rank in ranks)


def test_smallest_program_that_all_ranks_fit_is_the_steps_one() -> None:
    programs = family(100, 400, 200)
    assert programs.agreed(0b111) is programs[0] and programs.agreed(0b110) is programs[2]
    assert programs.agreed(0b110, alike=True) is programs.agreed(0b111, alike=True) is programs[1]


def test_program_without_a_plan_runs_under_the_next_larger_one() -> None:
    programs = family(100, 400, 200)
    programs[0].stage = programs[1].stage = Stage.WARM_UP
    assert programs.covering(programs[0]) is programs[2]
    assert programs.covering(programs[1]) is programs[1], "no plan is larger"
    programs[0].stage = Stage.GEN_POLICY
    assert programs.covering(programs[0]) is programs[0]


@pytest.mark.parametrize(
    ("inputs", "known", "growth"),
    [
        ("int64[1, 300]", "int64[1, 200]", 1.5),
        ("int64[1, 100], float32[1, 1, 100, 100]", "int64[1, 200], float32[1, 1, 200, 200]", 0.5),
        ("int64[1, 400], float32[1, 1, 400, 400]", "int64[1, 200], float32[1, 1, 200, 200]", 4.0),
        ("int64[2, 100], float32[3, 224, 224]", "int64[1, 100], float32[3, 224, 224]", 2.0),
        ("int64[7], float32[]", "int64[7], float32[]", 1.0),
        ("int64[1, 300]", "int32[1, 200]", None),
        ("int64[300]", "int64[1, 200]", None),
        ("int64[300]", "int64[0]", None),
    ],
)
def test_growth_of_a_step_follows_from_its_inputs(inputs: str, known: str, growth: float | None) -> None:
    assert growth_of(inputs, known) == growth


def test_inputs_name_the_smallest_program_that_has_room_for_them() -> None:
    programs = family(100, 400, 200)
    for one, size in zip(programs, (100, 400, 200), strict=True):
        one.note_beginning(f"int64[1, {size}]", step(size))
    for size, index in ((90, 0), (104, 0), (106, 2), (210, 2), (211, 1), (420, 1)):
        assert programs.beginning_with(f"int64[1, {size}]") == [programs[index]], size
    assert programs.beginning_with("int64[1, 421]") == []
    assert programs.beginning_with("int64[2, 1, 100]") == []


def test_inputs_that_steps_of_several_sizes_begin_with_name_the_program_for_the_largest() -> None:
    programs = family(100, 400, 200)
    for one, size in zip(programs, (100, 400, 200), strict=True):
        one.note_beginning("int64[8, 512]", step(size))
    assert programs.beginning_with("int64[8, 512]") == [programs[1]]
    programs[1].note_beginning("int64[8, 512]", step(900))
    assert programs.beginning_with("int64[8, 512]") == []


def test_largest_forward_decides_whether_a_step_fits() -> None:
    programs = Programs(0.05, 0.95)
    programs.remember(step(512, 512, 512, 512))
    assert voted(programs, 500, 512, 490, 460) == ([0], [])
    assert voted(programs, 1700, 116, 116, 116) == ([], []), "as many bytes, in one forward"


def test_first_program_is_made_for_the_largest_rank() -> None:
    programs = Programs(0.05, 0.95)
    ranks = Gathers(lambda value: 0 if isinstance(value, int) else (value[0], 250))
    assert families.meet(programs, ranks, step(100), None, 2).reach == 2.5


def test_longer_steps_are_planned_for_at_once_with_room_to_grow() -> None:
    programs = family(100)
    found = families.meet(programs, Gathers(), step(110), None, 2)
    assert found.reach * 110 == pytest.approx(125) and found.family == "a run:0" and found.steps == 2
    assert families.meet(programs, Gathers(), step(400), None, 2).reach == 1.0


def test_shorter_steps_get_programs_whose_sizes_tile_the_lengths() -> None:
    programs = family(900)
    made = families.meet(programs, Gathers(), step(390), programs[0], 2)
    assert made.reach * 390 == pytest.approx(400) and made.steps == 0, "it runs under the longer one's plan meanwhile"
    assert families.meet(programs, Gathers(), step(100), made, 2).reach * 100 == pytest.approx(400 / BAND**3)


def test_rank_with_an_empty_step_knows_the_sizes_of_the_program_that_others_met() -> None:
    programs = family(100)
    ranks = Gathers(lambda value: value if isinstance(value, int) else (value[0], 3.0))
    found = families.meet(programs, ranks, step(0), None, 2)
    assert found.extent == 3.0 and programs.has_room(step(300), found) and not programs.has_room(step(320), found)


def test_ranks_that_do_not_agree_on_a_relative_meet_a_program_without_a_family() -> None:
    programs = family(100)
    ranks = Gathers(lambda value: 0 if isinstance(value, int) else value)
    assert families.meet(programs, ranks, step(100), None, 2).family == 0


def test_program_that_was_recognised_is_not_forgotten_for_the_step_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_module, "MOST_PROGRAMS", 2)
    rank = alone()
    rank.train("AAAAAAABBBBBBB")
    first, second = rank.adjuster.programs
    assert rank.adjuster.begin("int64[100]") and rank.technique.key is first
    rank.adjuster.end_step(100, Program(None, ((777,),), nodes=777))
    rank.adjuster.end_step(101, Program(None, ((200,),), nodes=200))
    assert first in [*rank.adjuster.programs] or second in [*rank.adjuster.programs]
    assert any(one.baseline.nodes == 777 for one in rank.adjuster.programs)


def assert_has_room(rank: Rank, lengths: Sequence[int]) -> None:
    """Assert that no step ran under a plan for smaller ones."""
    for own, key, plan in zip(lengths, rank.keys, rank.under, strict=True):
        assert plan is None or own <= TOLERANCE * key.reach * key.baseline.size + 1e-6, (own, key.baseline.size)


def test_lengths_that_never_repeat_are_served_by_a_few_plans() -> None:
    rank = alone()
    lengths = [64 + 397 * number % 705 for number in range(300)]
    assert len(set(lengths)) == 300
    rank.train(lengths)
    bands = math.log(768 / 64) / math.log(BAND)
    assert rank.adjuster.replans <= len(rank.adjuster.programs) <= bands + 4
    assert sum(plan is not None for plan in rank.under[100:]) >= 190 and not rank.adjuster.programs.indifferent
    assert_has_room(rank, lengths)


@settings(deadline=None, max_examples=100)
@given(st.lists(LENGTHS, min_size=1, max_size=80))
def test_no_step_runs_under_a_plan_for_smaller_ones(lengths: list[int]) -> None:
    rank = alone()
    rank.train(lengths)
    assert_has_room(rank, lengths)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=80), st.booleans(), st.booleans())
def test_ranks_of_any_lengths_stay_in_agreement(
    pairs: list[tuple[int, int]], communicates: bool, knows_inputs: bool
) -> None:
    lengths = [*zip(*pairs, strict=True)]
    ranks = together(lengths, communicates, knows_inputs)
    one, other = (rank.adjuster for rank in ranks)
    assert ranks[0].changes == ranks[1].changes and one.replans == other.replans
    assert [each.stage for each in one.programs] == [each.stage for each in other.programs]
    assert one.programs.current.index == other.programs.current.index
    for rank, own in zip(ranks, lengths, strict=True):
        if knows_inputs and not communicates:
            assert_has_room(rank, own)


def test_ranks_with_lengths_of_their_own_are_all_planned_for() -> None:
    lengths = [[64 + 397 * number % 705 for number in range(start, start + 300)] for start in (0, 1000)]
    ranks = together(lengths)
    for rank, own in zip(ranks, lengths, strict=True):
        assert sum(plan is not None for plan in rank.under[100:]) >= 180
        assert_has_room(rank, own)


def test_ranks_that_have_to_run_alike_run_by_the_plan_for_the_longest() -> None:
    lengths = [[64 + 397 * number % 705 for number in range(start, start + 300)] for start in (0, 1000)]
    ranks = together(lengths, communicates=True)
    assert ranks[0].under == ranks[1].under and all(ranks[0].under[100:])
    assert len(set(ranks[0].under[100:])) <= 2
