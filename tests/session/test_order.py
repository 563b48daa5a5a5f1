"""The order of programs, and the program that the next step is likely to run."""

from __future__ import annotations

import itertools
import random

import pytest

from memplug.session.order import HORIZON_STEPS, REMEMBERED_STEPS, Order


def order_of(steps: str) -> Order:
    """Return the order of steps whose programs are named by letters."""
    order = Order()
    for each in steps:
        order.add(ord(each))
    return order


def following(steps: str, ahead: int = 1) -> str | None:
    found = order_of(steps).follows(ahead)
    return None if found is None else chr(found)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("pattern", ["A", "AB", "AAB", "AAAB", "ABC", "AABC", "ABACABAD", "AAAAAAAAAAB"])
def test_programs_in_fixed_turns_are_foreseen_from_the_fourth_round(pattern: str, ahead: int) -> None:
    steps = pattern * 8
    for end in range(3 * len(pattern) + 1, len(steps) - ahead + 1):
        assert following(steps[:end], ahead) == steps[end + ahead - 1], steps[:end]


def test_last_program_is_likely_again_once_it_has_run_twice_in_a_row() -> None:
    assert following("") is None
    assert following("AAAAB") == "A", "a single step of another program"
    assert following("AAAABB") == "B" and following("AAAABBAAB") == "B"


def test_programs_without_an_order_are_guessed_as_one_of_them() -> None:
    draw = random.Random(0)
    steps = "".join(draw.choices("ABC", k=300))
    assert {following(steps[:end]) for end in range(1, 300)} <= set("ABC")


def test_forgotten_program_is_never_expected() -> None:
    order = order_of("AB" * 10)
    order.forget(ord("B"))
    assert order.follows() == ord("A") and not order.has_lately(ord("B"))
    order.add(ord("B"))
    assert order.follows() in (ord("A"), ord("B"))


def test_no_program_repeats_only_if_none_ran_twice_in_fifty_steps() -> None:
    order = Order()
    for step in range(HORIZON_STEPS):
        assert not order.never_repeats
        order.add(step)
    assert order.never_repeats
    order.add(HORIZON_STEPS - 1)
    assert not order.never_repeats
    for step in itertools.islice(itertools.cycle(range(HORIZON_STEPS, 2 * HORIZON_STEPS)), 2 * REMEMBERED_STEPS):
        order.add(step)
    assert order.never_repeats, "each ran 50 steps before"
