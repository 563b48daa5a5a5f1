"""Remembered programs: a rank's vote, the result of all votes, and programs that are forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplug.profile.similarity import Program, similar
from memplug.session import programs as programs_module
from memplug.session.programs import FIRST_UNDER, MOST_PROGRAMS, SIMILAR, Programs
from memplug.session.remembered import MOST_BEGINNINGS, Remembered
from memplug.session.table import Stage


def step(length: int) -> Program:
    """Return the program of steps of this length, unlike that of any other length."""
    return Program(None, ((length,),), nodes=length)


def remembered(lengths: Sequence[int]) -> Programs:
    """Return remembered programs of these lengths, the last of them current."""
    known = Programs(0.05, 0.95)
    for length in lengths:
        known.enter(known.remember(step(length)))
    return known


def find(known: Programs, length: int) -> Remembered | None:
    return known.agreed(known.vote(step(length)))


def test_vote_names_every_program_that_the_step_resembles() -> None:
    known = remembered([1000, 1040, 2000])
    assert [known.vote(step(length)) for length in (1020, 1000, 1085, 2000, 3000)] == [0b011, 0b011, 0b010, 0b100, 0]


def test_ranks_agree_on_the_current_then_a_planned_then_the_latest_program() -> None:
    known = remembered([1000, 1010, 1020, 1030])
    both = known.vote(step(1015))
    assert both == 0b1111
    assert known.agreed(both) is known.current and known.current.index == 3
    assert known.agreed(0b0111).index == 2
    known[0].stage = Stage.STABLE
    assert known.agreed(0b0111).index == 0
    known[1].stage = Stage.STABLE
    assert known.agreed(0b0111).index == 1
    assert known.agreed(0b1111).index == 1, "the current one has no plan"
    known.current.stage = Stage.STABLE
    assert known.agreed(0b1111) is known.current
    assert known.agreed(0) is None


def test_program_under_whose_settings_all_ranks_ran_comes_first() -> None:
    known = remembered([1000, 1010, 1020])
    known[0].stage = known[2].stage = Stage.STABLE
    for each in known:
        mask = 0b111 | 1 << FIRST_UNDER + each.index
        assert known.under(mask) is each and known.agreed(mask & SIMILAR, each) is each
    assert known.under(0b111) is None and known.agreed(0b011, known[2]) is known[0], "the step was no such program"


def test_inputs_name_the_programs_that_began_with_them_and_larger_ones_are_noticed() -> None:
    known = remembered([1000, 2000])
    known[0].note_beginning("int64[2, 8], float32[]")
    for each in known:
        each.note_beginning("int64[4, 8]")
    assert known.beginning_with("int64[4, 8]") == [known[0], known[1]]
    assert known.beginning_with("int64[2, 8], float32[]") == [known[0]] and known.beginning_with("int64[9]") == []
    assert [known[0].is_smaller(f"int64[{n}, 8]", 0.05) for n in (3, 4, 5)] == [False, False, True]
    for length in range(MOST_BEGINNINGS):
        known[0].note_beginning(f"int64[{length}]")
    assert len(known[0].begins) == MOST_BEGINNINGS and "int64[4, 8]" not in known[0].begins


def test_program_change_on_one_rank_changes_the_program_on_all_ranks() -> None:
    # for a while, only the second rank's step changes
    ranks = [remembered([1000]), remembered([1000])]

    def boundary(*lengths: int) -> int:
        mask = reduce(and_, (rank.vote(step(length)) for rank, length in zip(ranks, lengths, strict=True)))
        seen = [rank.agreed(mask) for rank in ranks]
        if seen[0] is None:
            seen = [rank.remember(step(length)) for rank, length in zip(ranks, lengths, strict=True)]
        for rank, entry in zip(ranks, seen, strict=True):
            rank.enter(entry)
        assert len({entry.index for entry in seen}) == 1
        return seen[0].index

    assert [boundary(1000, other) for other in (1000, 1500, 1500, 1000, 1500, 1000)] == [0, 1, 1, 0, 1, 0]
    assert boundary(1500, 1000) == 2, "only the first rank's step changed: a third program"
    assert [len(rank) for rank in ranks] == [3, 3]


def test_least_recently_used_program_is_replaced() -> None:
    known = remembered([100 * 2**i for i in range(MOST_PROGRAMS)])
    known.enter(find(known, 100))
    new = known.remember(step(3))
    assert new.index == 1 and len(known) == MOST_PROGRAMS and known.made == MOST_PROGRAMS + 1
    assert find(known, 3) is new and find(known, 200) is None
    assert find(known, 100) is known.current, "the oldest one, but it is current"


def test_current_program_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_module, "MOST_PROGRAMS", 2)
    known = remembered([100, 200])
    known.enter(find(known, 200))
    for length in (300, 400, 500):
        known.remember(step(length))
        assert find(known, 200) is known.current and len(known) == 2


def test_renewal_moves_a_programs_baseline_and_drift_counts_from_there() -> None:
    known = remembered([1000])
    for length in (1040, 1080, 1120):
        assert find(known, length) is known.current
        known.renew(step(length))
    assert find(known, 1160) is known.current
    assert find(known, 1200) is None, "too far from the last renewal"
    assert find(known, 1000) is None


def test_repeated_votes_compare_programs_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, fits = [], Programs.fits

    def count(*args: Any) -> bool:
        compared.append(args)
        return fits(*args)

    monkeypatch.setattr(Programs, "fits", count)
    known = remembered([100, 200, 300])
    assert {known.vote(step(200)) for _ in range(100)} == {0b010} and len(compared) == 3
    known.remember(step(204))
    assert known.vote(step(200)) == 0b1010 and len(compared) == 7
    assert known.vote(step(320)) == 0
    known.renew(step(310))
    assert known.vote(step(320)) == 0b0100


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([100, 103, 200, 206, 400, 800, 1600]), min_size=3, max_size=3), min_size=1, max_size=60
    )
)
def test_all_ranks_remember_and_forget_the_same_programs(boundaries: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs_module, "MOST_PROGRAMS", 4)
        ranks = [Programs(0.05, 0.95) for _ in range(3)]
        for lengths in boundaries:
            mask = reduce(and_, (rank.vote(step(length)) for rank, length in zip(ranks, lengths, strict=True)))
            found = [rank.agreed(mask) for rank in ranks]
            assert len({entry and entry.index for entry in found}) == 1
            for rank, entry, length in zip(ranks, found, lengths, strict=True):
                entry = entry or rank.remember(step(length))
                assert similar(entry.baseline, step(length), 0.05, 0.95)
                rank.enter(entry)
            assert len({rank.current.index for rank in ranks}) == 1
            assert len({len(rank) for rank in ranks}) == 1 and len(ranks[0]) <= 4


def test_baseline_takes_operators_from_the_first_watched_step():
    known = Programs(0.05, 0.95)
    known.enter(known.remember(Program(None, ((100,),), 7)))
    other = Program([4, 5, 6], ((100,),), 7)
    assert known.vote(other) == 1, "nothing tells them apart yet"
    known.renew(Program([1, 2, 3], ((100,),), 7))
    assert known.vote(Program([4, 5, 6], ((100,),), 7)) == 0 and known.vote(Program(None, ((100,),), 7)) == 1
    known.renew(Program(None, ((100,),), 7))
    assert known.vote(other) == 0, "an unwatched step leaves the baseline its operators"


def looped(nodes: int, times: int | None = None) -> Program:
    """Return a step of a loop; None: it was not watched."""
    operators = None if times is None else [*range(200), *[7, 8, 9] * times, *range(200, 400)]
    return Program(operators, ((100,),), nodes)


def test_step_of_other_nodes_is_doubted_if_its_program_varies_in_them():
    programs = Programs(0.05, 0.95)
    programs.enter(programs.remember(looped(1000, 10)))
    assert programs.vote(looped(1500)) == 0 and not programs.doubts
    assert programs.vote(looped(1200, 100)) == 1 and not programs.doubts
    assert programs.vote(looped(1500)) == 1 and programs.doubts
    assert programs.vote(looped(1500, 200)) == 1 and not programs.doubts
    assert programs.current.nodes == (1000, 1500)
    assert programs.vote(replace(looped(1500), sizes=((300,),))) == 0 and not programs.doubts
    assert programs.vote(Program([*range(300)], ((100,),), 1500)) == 0
