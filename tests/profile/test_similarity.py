"""Two steps are one program despite small differences, but not with other lengths, operators or orders."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplug.profile.similarity import Program, cosine, difference, similar

OPERATORS = st.lists(st.integers(0, 40), max_size=300)
LONG = st.lists(st.integers(0, 40), min_size=200, max_size=400)
SIZES = st.lists(st.lists(st.integers(0, 10**12), max_size=3).map(tuple), max_size=7).map(tuple)
PROGRAMS = st.builds(Program, OPERATORS, SIZES)
SHARES = st.floats(0, 1)
LIMITS = (0.05, 0.95)

FORWARD = [*range(10, 40), 11, 12, 40]
BACKWARD = [*range(50, 90), 55, 66]
OPTIMIZER = [100, 101, 102] * 20


def program(operators: list[int] | np.ndarray = (), sizes: list[int] = (100, 100)) -> Program:
    return Program(operators, (tuple(sizes),))


# -- a relation --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(OPERATORS, SIZES, SHARES, SHARES)
def test_program_is_similar_to_itself_under_any_limits(operators, sizes, tolerance, limit):
    one, other = Program(operators, sizes), Program(operators, sizes)
    assert similar(one, other, tolerance, limit) and one.same(other)
    assert cosine(one, other) == 1.0


@settings(deadline=None)
@given(PROGRAMS, PROGRAMS, SHARES, SHARES)
def test_similarity_is_symmetric(one, other, tolerance, limit):
    assert similar(one, other, tolerance, limit) == similar(other, one, tolerance, limit)
    assert cosine(one, other) == cosine(other, one)
    assert 0.0 <= cosine(one, other) <= 1.0 + 1e-12


@settings(deadline=None)
@given(PROGRAMS, PROGRAMS, SHARES, SHARES, SHARES, SHARES)
def test_wider_limits_accept_every_pair_that_narrower_ones_accept(one, other, t1, t2, c1, c2):
    if similar(one, other, min(t1, t2), max(c1, c2)):
        assert similar(one, other, max(t1, t2), min(c1, c2))


def test_regions_unseen_in_one_of_two_steps_are_ignored():
    whole, first = Program(None, ((5, 5), (7, 7), (9,))), Program(None, ((5, 5), (), ()), unseen=frozenset({1, 2}))
    assert similar(whole, first, 0.0, 1.0) and whole.same(first)
    shorter = Program(None, ((5,), (7,), ()), unseen=frozenset({1, 2}))
    assert not similar(whole, shorter, *LIMITS) and not whole.same_sizes(shorter)
    assert not similar(whole, Program(None, ((5, 5), (), ())), *LIMITS), "it saw that they did not run"
    assert difference(shorter, whole) == "1 region inputs (-50% of bytes)"


# -- differences that are no change ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(LONG, st.lists(st.tuples(st.floats(0, 1), st.integers(0, 60)), min_size=1, max_size=2))
def test_few_inserted_operators_are_no_change(operators, insertions):
    longer = list(operators)
    for where, operator in insertions:
        longer.insert(int(where * len(longer)), operator)
    assert similar(program(operators), program(longer), *LIMITS)


@pytest.mark.parametrize("where", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("share", [0.01, 0.04])
def test_block_within_the_tolerance_is_no_change_at_any_position(where, share):
    # the block shifts all later operators: a comparison by position would see a change
    step = (FORWARD * 16 + BACKWARD * 16) * 2 + OPTIMIZER
    at, extra = int(where * len(step)), [200 + i % 7 for i in range(int(share * len(step)))]
    assert similar(program(step), program(step[:at] + extra + step[at:]), *LIMITS)


# -- differences that are a change -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(LONG, st.data())
def test_replacing_every_operator_is_a_change(operators, data):
    shift = data.draw(st.integers(41, 1000))
    assert not similar(program(operators), program([o + shift for o in operators]), *LIMITS)


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_same_blocks_in_another_order_are_a_change(micro_batches):
    # all forwards run before all backwards: same operators, nearly the same pairs, but more graphs in flight
    forward, backward = FORWARD * 8, BACKWARD * 8
    one = program((forward + backward) * micro_batches + OPTIMIZER)
    other = program(forward * micro_batches + backward * micro_batches + OPTIMIZER)
    assert not similar(one, other, *LIMITS)


def test_moving_the_optimizer_to_the_beginning_of_a_step_is_a_change():
    layers, optimizer = FORWARD * 8 + BACKWARD * 8, OPTIMIZER * 5
    assert not similar(program(layers + optimizer), program(optimizer + layers), *LIMITS)


def test_exchanging_all_neighbouring_operators_is_a_change():
    one = FORWARD * 16
    other = np.array(one[: len(one) // 2 * 2]).reshape(-1, 2)[:, ::-1].ravel()
    assert sorted(other) == sorted(one[: len(other)])
    assert not similar(program(one), program(other), *LIMITS)


@pytest.mark.parametrize(("longer", "same"), [(1052, True), (1053, False)])
def test_number_of_operators_may_differ_by_the_tolerance(longer, same):
    # 52 of 1,052 is less than 5 %, and 53 of 1,053 is more; the cycle is too long for the body of a loop
    assert similar(program(np.arange(1000) % 150), program(np.arange(longer) % 150), *LIMITS) is same


@pytest.mark.parametrize("turns", [1, 3, 40])
@pytest.mark.parametrize("body", [[1], [1, 2, 2, 3], [*range(100)]])
def test_loop_that_runs_more_often_makes_no_other_program(body, turns):
    def step(times):
        return Program([*FORWARD, *body * times, *BACKWARD, *body[::-1] * times, *OPTIMIZER], ((100,),), 50 + times)

    assert similar(step(8), step(turns), *LIMITS)
    assert step(8).folded.same(replace(step(turns).folded, nodes=58))


def test_loops_with_other_bodies_make_other_programs():
    assert not similar(program([*FORWARD, *[1, 2] * 4]), program([*FORWARD, *range(41, 49), *[3, 4] * 40]), *LIMITS)


def test_as_many_operators_in_another_order_are_a_change_although_folded_they_are_alike():
    whole, turns = program([*[1, 2] * 60, *[3, 4] * 60]), program([1, 2, 3, 4] * 60)
    assert whole.folded.operators.tolist() == turns.folded.operators.tolist() == [1, 2, 3, 4]
    assert not similar(whole, turns, *LIMITS)


@pytest.mark.parametrize(("total", "same"), [(1050, True), (1060, False), (950, True), (940, False)])
def test_bytes_of_region_inputs_may_differ_by_the_tolerance(total, same):
    # a longer sequence runs the same operators, so only the bytes tell the programs apart
    assert similar(program([1, 2, 3], [500, 500]), program([1, 2, 3], [500, total - 500]), *LIMITS) is same


def test_zero_tolerance_requires_equal_operator_and_byte_counts():
    one = program([1, 2, 3, 4], [10, 20])
    assert similar(one, program([1, 2, 4, 3], [20, 10]), 0.0, 0.0)
    assert not similar(one, program([1, 2, 3], [10, 20]), 0.0, 0.0)
    assert not similar(one, program([1, 2, 3, 4], [10, 21]), 0.0, 0.0)
    assert not similar(one, program([1, 2, 4, 3], [10, 20]), 1.0, 1.0)


# -- nothing to compare ------------------------------------------------------------------------------------------------


def test_input_bytes_alone_are_compared_without_recorded_operators():
    assert similar(program([], [100]), program([], [104]), *LIMITS)
    assert not similar(program([], [100]), program([], [110]), *LIMITS)
    assert not similar(program([], [100]), program([], []), *LIMITS)
    assert similar(program([], []), program([], []), 0.0, 1.0)


def test_empty_and_nonempty_sequences_are_different_programs():
    assert not similar(program([]), program([1]), *LIMITS)
    assert not similar(program([1]), program([2]), *LIMITS)


# -- steps without watched operators -----------------------------------------------------------------------------------


def test_unwatched_step_is_compared_by_nodes_and_sizes():
    watched = Program([1, 2, 3], ((100,),), 50)
    assert similar(watched, Program(None, ((100,),), 50), *LIMITS) and similar(
        watched, Program(None, ((104,),), 51), *LIMITS
    )
    assert not similar(watched, Program(None, ((100,),), 60), *LIMITS)
    assert not similar(watched, Program(None, ((110,),), 50), *LIMITS)


def test_different_node_counts_are_different_programs():
    assert not similar(Program([1, 2, 3], ((100,),), 50), Program([1, 2, 3], ((100,),), 100), *LIMITS)


# -- text and fingerprints ---------------------------------------------------------------------------------------------


def test_fingerprint_is_the_same_in_another_process_and_unique():
    one = program([3, 1, 2], [7])
    code = "from memplug.profile.similarity import Program; print(Program([3, 1, 2], ((7,),)).fingerprint)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    others = {program(*args).fingerprint for args in (([3, 1, 2], [8]), ([3, 2, 1], [7]), ([3, 1, 2, 7, 0], []))}
    assert one.fingerprint == printed and one.fingerprint not in others and len(others) == 3


def test_difference_of_two_programs_is_described_in_words():
    text = difference(program([1] * 1240, [1000] * 64), program([1] * 1000, [1250] * 64))
    assert "1,240 operators (+24%)" in text and "64 region inputs (-20% of bytes)" in text and "similarity 1.00" in text
    assert difference(program(None, [3]), program(None, [2])) == "1 region inputs (+50% of bytes)"
    assert "4 nodes (+100%)" in difference(Program(None, ((3,),), 4), Program([1], ((3,),), 2))
    assert "none before" in difference(program([1], [3]), program([], []))
