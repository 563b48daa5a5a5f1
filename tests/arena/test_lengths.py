"""Inputs whose sizes change from step to step: one plan serves all of them, as large as the largest step needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import memplug
from memplug.arena.judge import judge_addresses
from memplug.arena.plan import auto
from memplug.arena.plan.changed import with_longer
from memplug.arena.plan.part import address_plan
from memplug.arena.plan.problem import Problem, buffers
from memplug.arena.planning import _grown
from memplug.arena.report import ArenaReport
from memplug.profile.records import Fingerprint, Pass, Phase
from memplug.profile.scaling import BOUNDED, CONSTANT
from memplug.sizes import BLOCK_BYTES
from tests.support.lengths import (
    Draw,
    Largest,
    any_batch,
    batch_and_length,
    buckets_of_lengths,
    llama,
    micro_batches,
    normal,
    one_length,
    train,
)

ARENA_ALONE = {"enabled": False}
BLOCK = {"enabled": True, "plan_dir": False, "profiler": {"wait_for_plans": True}}


def reports(
    draw: Draw, steps: int, attention: str = "eager", tokenwise: dict[str, Any] | None = None
) -> tuple[list[ArenaReport], Problem]:
    """Train with the arena, and check losses and weights against a training without memplug.

    Returns:
        A report for each step, and the problem of the last plan.
    """
    model, plain = llama(attention), llama(attention)
    found: list[ArenaReport] = []
    with memplug.attach(model, {**BLOCK, "tokenwise": tokenwise or ARENA_ALONE}) as session:

        def end_step() -> None:
            session.step()
            found.append(session.report().arena)

        losses = [*train(model, draw, steps, end_step)]
        plan = session._attached.boundary.followers.find("arena").plan
    assert losses == [*train(plain, draw, steps)]
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))
    return found, plan.problem


def check_serving(found: list[ArenaReport], share: float = 0.99) -> None:
    """Check that one plan, or one more, serves this share of the last 20 steps' bytes."""
    before, last = found[-21], found[-1]
    served, fell = last.served_bytes - before.served_bytes, last.fallback_bytes - before.fallback_bytes
    assert last.state == "serving" and last.plans <= 2
    assert served >= share * (served + fell)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("draw", [one_length, buckets_of_lengths, batch_and_length, micro_batches, normal])
def test_one_plan_serves_all_lengths_in_memory_for_the_longest(draw: Draw, attention: str) -> None:
    found, problem = reports(draw, 70, attention)
    check_serving(found)
    longest, problem_of_longest = reports(lambda random: draw(Largest()), 12, attention)
    assert problem.lower_bound <= 1.02 * problem_of_longest.lower_bound
    assert found[-1].bytes <= 1.2 * longest[-1].bytes, "planners have half a second, so that a busy machine finds less"


def test_steps_that_make_a_few_other_requests_are_served_too() -> None:
    # a batch of one sequence needs no copies where a larger one does
    check_serving(reports(any_batch, 70)[0], 0.98)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_one_plan_serves_all_lengths_of_regions_that_swap_or_recompute(alpha: float) -> None:
    found, _ = reports(one_length, 60, tokenwise={"alpha": alpha, "min_offload_bytes": 0})
    check_serving(found)


def test_longer_steps_than_planned_make_the_arena_larger_without_a_new_recording() -> None:
    lengths = [*(20, 30) * 6, 90, *(20, 90, 60) * 7]
    drawn = iter([*lengths, *lengths])
    found, _ = reports(lambda random: [(2, next(drawn))], len(lengths))
    planned, longer, last = found[11], found[12], found[-1]
    assert planned.state == "serving" and last.plans == 1 and last.amendments >= 1
    assert longer.fallback_bytes > planned.fallback_bytes and last.bytes > 2 * planned.bytes
    check_serving(found)


def plan_of_two_lengths(tokens: int) -> Problem:
    """Return the problem of three requests for 4 blocks a token, for 3 blocks at most, and for 1 block."""
    table = buffers(np.array([[0, 9, 4 * tokens], [1, 5, 3], [2, 7, 1]], np.int64))
    table["size"] *= BLOCK_BYTES
    table["alignment"], table["lower_phase"], table["upper_phase"] = BLOCK_BYTES, 0, 0
    table["term"], table["factor"][0] = (1, BOUNDED, 0), 4 * BLOCK_BYTES
    return Problem(buffers=table, phases=(Phase(Pass.FORWARD, 0),), terms=((), (1,)))


@pytest.mark.parametrize(("tokens", "blocks"), [(5, None), (3, None), (6, [24, 4, 1]), (10, [40, 6, 1])])
def test_problem_of_a_longer_step_scales_what_follows_from_its_inputs(tokens: int, blocks: list[int] | None) -> None:
    problem = plan_of_two_lengths(5)
    longer = with_longer(problem, ((1, tokens),))
    if longer is None:
        assert blocks is None
        return
    assert (longer.buffers["size"] // BLOCK_BYTES).tolist() == blocks
    assert judge_addresses(address_plan(longer, auto.plan(longer, "search", time_limit_s=1))) == ()
    assert with_longer(longer, ((1, tokens),)) is None


@pytest.mark.parametrize(
    ("inputs", "grown"), [((10, 10), [4, 40, 6, 4, 40, 3, 12]), ((5, 20), [2, 20, 3, 4, 80, 6, 24])]
)
def test_rooms_grow_as_the_largest_micro_batch_others_as_their_own(inputs: tuple[int, int], grown: list[int]) -> None:
    rows = [[0, 9, 2], [1, 9, 20], [2, 5, 3], [19, 29, 2], [20, 29, 40], [21, 25, 3], [0, 30, 12]]
    table = buffers(np.array(rows, np.int64))
    table["size"] *= BLOCK_BYTES
    table["alignment"], table["lower_phase"] = BLOCK_BYTES, [0, 1, 1, 2, 3, 3, -1]
    table["term"] = [BOUNDED, 1, BOUNDED, BOUNDED, 1, BOUNDED, CONSTANT]
    table["factor"][[1, 4]], table["room"][6] = 4 * BLOCK_BYTES, True
    phases = tuple(Phase(kind, number) for number in (0, 1) for kind in (Pass.OTHER, Pass.FORWARD))
    problem = Problem(buffers=table, phases=phases, terms=((), (1,)))  # 5 tokens, and 10
    longer = with_longer(problem, tuple((1, tokens) for tokens in inputs))
    assert (longer.buffers["size"] // BLOCK_BYTES).tolist() == grown


@dataclass(frozen=True)
class Recorded:
    """A recorded step, of which only the inputs count."""

    fingerprint: Fingerprint


def recorded(*inputs: str) -> Recorded:
    return Recorded(Fingerprint(inputs=inputs))


def test_inputs_grow_in_those_dimensions_that_differ_between_steps() -> None:
    one, other = recorded("int64[2, 100], int64[2, 100]"), recorded("int64[2, 60], int64[2, 60]")
    assert _grown(one, [other], 1.5) == ((2, 150, 2, 150),)
    assert _grown(one, [other], 1.0) == _grown(one, [], 2.0) == ((2, 100, 2, 100),)
    assert _grown(one, [recorded("int64[4, 60], int64[4, 60]")], 4.0) == ((4, 200, 4, 200),)
    assert _grown(one, [recorded("int64[2, 60]"), other], 1.5) == ((2, 100, 2, 100),), "another kind of inputs"
