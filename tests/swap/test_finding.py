"""Tensors of the swap list are found in slightly different steps, and never confused with others."""

from __future__ import annotations

import random

import pytest

from tests.support import extension
from tests.support.rehearsals import Operator, flat, listed, rehearsal

pytest.importorskip("transformers")


def found_in(kind: str, step: list[list[Operator]]) -> list[int]:
    return rehearsal(kind).run(flat(step))


def edited(step: list[list[Operator]], share: float, chance: random.Random) -> tuple[list[list[Operator]], set[int]]:
    """Edit a step at this share of its outermost operators; return it, and the tensors that removed operators used.

    An edit inserts an operator, removes one, or exchanges two neighbours.
    """
    result: list[list[Operator]] = []
    touched: set[int] = set()
    index = 0
    while index < len(step):
        group, kind = step[index], chance.choice(["insert", "remove", "swap"])
        index += 1
        if chance.random() >= share:
            result.append(group)
        elif kind == "insert":
            other = chance.choice(step)[0]
            result += [[(other[0], 0, [], [(10**6 + index, 4096, 6)])], group]
        elif kind == "remove":
            touched |= {tensor for operator in group for used in operator[2:] for tensor, _, _ in used}
        elif index < len(step):
            result += [step[index], group]
            index += 1
    return result, touched


KINDS = {"llama": 0.99, "t5": 0.99, "vit": 0.99, "convolutions": 0.98}
"""Least share of tensors to find. The layers of `convolutions` look alike: one size, and four operators each."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_found_in_the_planned_step(kind: str) -> None:
    _, tensors, step = listed(kind)
    assert len(tensors) > 25
    assert found_in(kind, step) == list(tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_nearly_all_tensors_are_found_if_1_percent_of_operators_change(kind: str) -> None:
    _, tensors, step = listed(kind)
    chance, there, found = random.Random(0), 0, 0
    for _ in range(150):
        changed, touched = edited(step, 0.01, chance)
        for tensor, taken in zip(tensors, found_in(kind, changed), strict=True):
            assert taken in (tensor, -1)
            if tensor not in touched:
                there += 1
                found += taken == tensor
    assert found >= KINDS[kind] * there


@pytest.mark.long
@pytest.mark.parametrize("share", [0.01, 0.03])
def test_edited_steps_never_match_a_wrong_tensor(share: float) -> None:
    _, tensors, step = listed("llama")
    chance = random.Random(1)
    for _ in range(2500):
        changed, _ = edited(step, share, chance)
        assert all(taken in (tensor, -1) for tensor, taken in zip(tensors, found_in("llama", changed), strict=True))


def test_tensors_of_another_size_or_dtype_do_not_match() -> None:
    _, _, step = listed("llama")
    for change in (lambda nbytes, dtype: (3 * nbytes + 1, dtype), lambda nbytes, dtype: (nbytes, dtype + 1)):
        changed = [
            [
                (number, depth, *([(one, *change(*rest)) for one, *rest in used] for used in (inputs, outputs)))
                for number, depth, inputs, outputs in group
            ]
            for group in step
        ]
        assert set(found_in("llama", changed)) == {-1}
    assert set(found_in("llama", [])) == {-1}


def test_place_in_the_program_recovers_after_changed_operators() -> None:
    """Expect the planned places again within ten operators of the change."""
    program = [number % 17 for number in range(200)]
    places = extension.load().program_places
    assert places(program, program) == list(range(200))
    assert places(program, program[:50] + [99, 98] + program[50:])[60:] == list(range(58, 200))
    assert places(program, program[:50] + program[53:])[60:] == list(range(63, 200))
    assert places(program, program[:50] + [program[51], program[50]] + program[52:])[60:] == list(range(60, 200))
    assert places([], [1, 2, 3]) == [0, 1, 2]
