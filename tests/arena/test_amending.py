"""A plan is amended, without a new recording, where dynamic requests find too little room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

import memplug
from memplug.arena.amending import MISSED_STEPS, MOST_GROWTH, Lack, Resized, has_unknown_sizes
from memplug.arena.judge import judge_addresses
from memplug.arena.plan import auto
from memplug.arena.plan.changed import with_dynamic, with_lives
from memplug.arena.plan.part import AddressPlan, address_plan
from memplug.arena.plan.problem import Problem, buffers, live_bytes
from memplug.arena.planning import amended, planned
from memplug.arena.report import ArenaReport
from memplug.profile.records import Pass, Phase
from memplug.sizes import BLOCK_BYTES
from tests.support.routed import Mixture, serve

BLOCK = {
    "enabled": True,
    "plan_dir": False,
    "profiler": {"wait_for_plans": True},
    "tokenwise": {"enabled": False},
}


def step(served: int, missed: int, largest: int = 0) -> SimpleNamespace:
    """Return the counts of a step that reach `Lack`."""
    return SimpleNamespace(dynamic_bytes=served, dynamic_missed_bytes=missed, dynamic_missed_largest=largest)


def problem_with_room(*sizes: int) -> Problem:
    """Return a problem of one request, and a room of rectangles that lie on one another."""
    table = buffers(np.array([[0, 9, BLOCK_BYTES], *([at, 9, size] for at, size in enumerate(sizes))], np.int64))
    table["room"][1:] = True
    table["alignment"] = BLOCK_BYTES
    return Problem(buffers=table)


def test_few_missed_bytes_are_no_lack() -> None:
    lack = Lack()
    for _ in range(MISSED_STEPS + 3):
        lack.end_step(step(10_000, 0))
        lack.end_step(step(10_000, 10))
    assert not lack.lasts


def test_lack_lasts_after_some_steps_that_miss_much() -> None:
    lack = Lack()
    for number in range(1, MISSED_STEPS + 1):
        lack.end_step(step(10_000, 500))
        assert lack.lasts == (number == MISSED_STEPS)


@pytest.mark.parametrize(("missed", "largest", "grown"), [(4, 4, 4), (10_000, 7, 50), (10_000, 80, 80)])
def test_room_grows_by_what_was_missed_but_not_at_once_by_much(missed: int, largest: int, grown: int) -> None:
    lack, problem = Lack(), problem_with_room(800 * BLOCK_BYTES, 200 * BLOCK_BYTES)
    for _ in range(MISSED_STEPS):
        lack.end_step(step(10_000, missed * BLOCK_BYTES, largest * BLOCK_BYTES))
    larger = lack.with_more_room(problem)
    assert 0 <= larger.room_bytes - problem.room_bytes - grown * BLOCK_BYTES <= 2 * BLOCK_BYTES
    assert larger.room_bytes <= (1 + max(MOST_GROWTH, largest / 1000)) * problem.room_bytes + 2 * BLOCK_BYTES
    assert larger.buffers[0] == problem.buffers[0] and (larger.buffers["size"] % BLOCK_BYTES == 0).all()


def test_amended_plans_serve_a_routing_that_needs_more_than_the_recorded_steps() -> None:
    random = np.random.default_rng(3)
    few = Mixture(layers=4, experts=4, tokens=400, saved=(256,), scratch=(128,), planned=(4096, 4096), skew=9.0)
    more = Mixture(layers=4, experts=4, tokens=520, saved=(256,), scratch=(128,), planned=(4096, 4096), skew=9.0)
    plan, _ = planned(few.step(random), [few.step(random)], "auto", False)
    before, lack, amendments = plan.solution.height, Lack(), 0
    served = serve(plan, more.step(random))
    assert served.missed > 0.05
    for _ in range(60):
        lack.end_step(served)
        if lack.lasts:
            plan, _ = amended(replace(plan, problem=lack.with_more_room(plan.problem)), "auto")
            amendments, lack = amendments + 1, Lack()
            assert judge_addresses(plan) == ()
        served = serve(plan, more.step(random))
        assert served.occupied == 0
    assert served.missed == 0 and 1 <= amendments <= 16
    assert before < plan.solution.height <= 1.5 * before


class Part(nn.Module):
    """A layer that only a part of its tokens pass through; the part changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)
        self.share = 0.5

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count = int(self.share * len(tokens))
        changed = self.narrow(torch.relu(self.wide(tokens[:count])))
        return tokens + torch.cat([changed, tokens[count:]])


def trained(model: nn.Module, *shares: tuple[int, int, float, float]) -> Iterator[ArenaReport]:
    """Train a model of such layers, and yield a report after each part of the training.

    Args:
        model: its layers are of the class `Part`.
        shares: for each part of the training (steps, layers, least, most): how many layers get a share of the tokens
            that is drawn between these two.
    """
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    random = np.random.default_rng(0)
    with memplug.attach(model, BLOCK) as session:
        for steps, layers, least, most in shares:
            for _ in range(steps):
                for layer in [*model][:layers]:
                    layer.share = random.uniform(least, most)
                model(torch.randn(512, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                session.step()
            yield session.report().arena


def test_session_amends_its_plan_where_more_tokens_take_part_than_before() -> None:
    model = nn.Sequential(*(Part() for _ in range(4)))
    first, report, last = trained(model, (12, 4, 0.4, 0.5), (40, 4, 0.6, 0.7), (1, 4, 0.6, 0.7))
    assert first.state == "serving" and first.dynamic > 0
    assert report.plans == first.plans == 1 and report.amendments > first.amendments
    assert report.bytes > first.bytes
    assert last.dynamic > report.dynamic and last.fallback_bytes == report.fallback_bytes


@pytest.mark.parametrize("layers", [1, 2])
def test_requests_become_dynamic_once_their_sizes_change(layers: int) -> None:
    model = nn.Sequential(*(Part() for _ in range(4 * layers)))
    kept, report, last = trained(model, (12, 0, 0, 0), (40, layers, 0.4, 0.6), (9, layers, 0.4, 0.6))
    assert kept.state == "serving" and kept.dynamic == 0 and kept.fallback_bytes == 0
    assert (report.plans, report.state) == (1, "serving") and 1 <= report.amendments <= 6
    assert report.bytes <= 1.25 * kept.bytes
    assert last.dynamic > report.dynamic and last.fallback_bytes == report.fallback_bytes
    assert last.amendments == report.amendments


def test_few_large_requests_with_other_sizes_become_dynamic_too() -> None:
    few, many = nn.Sequential(Part()), nn.Sequential(*(nn.Linear(64, 64) for _ in range(200)))
    model = nn.Sequential(*few, *(Part() for _ in range(3)), many)
    _, report, last = trained(model, (12, 0, 0, 0), (30, 1, 0.4, 0.6), (9, 1, 0.4, 0.6))
    assert (report.plans, report.state) == (1, "serving") and report.amendments >= 1
    assert last.fallback_bytes == report.fallback_bytes


def plan_and_rows(*lives: tuple[int, int, int], room: int = 0) -> AddressPlan:
    """Return a plan of requests (lower, upper, blocks), all made and freed in one place, and of a room."""
    table = buffers(np.array([*lives, (0, 20, room)], np.int64))
    table["size"] *= BLOCK_BYTES
    table["alignment"], table["room"][-1] = BLOCK_BYTES, True
    for column in ("lower_phase", "upper_phase"):
        table[column][:-1] = 0
    problem = Problem(buffers=table[: len(lives) + (room > 0)], phases=(Phase(Pass.FORWARD, 0),))
    return address_plan(problem, auto.plan(problem, "search", time_limit_s=1))


@pytest.mark.parametrize("room", [0, 5])
def test_requests_that_are_made_dynamic_leave_their_bytes_to_the_room(room: int) -> None:
    plan = plan_and_rows((0, 9, 4), (2, 6, 3), (3, 9, 2), (5, 12, 1), room=room)
    changed = with_dynamic(plan, {1: 5 * BLOCK_BYTES, 3: BLOCK_BYTES})
    assert changed.problem.requests == 2
    sizes = dict(
        zip(*map(np.ndarray.tolist, live_bytes(changed.problem.buffers[changed.problem.buffers["room"]])), strict=True)
    )
    assert {at: nbytes // BLOCK_BYTES - room for at, nbytes in sizes.items() if at in (2, 5, 6)} == {2: 5, 5: 6, 6: 1}
    (group,) = changed.dynamic
    assert group.mallocs == (2, 5) and (group.lower, group.upper) == (2, 12)
    solved, _ = amended(changed, "auto")
    assert judge_addresses(solved) == ()
    assert max(end - begin for begin, end in solved.dynamic[0].spaces) >= 6 * BLOCK_BYTES
    again = with_dynamic(solved, {0: BLOCK_BYTES})
    assert again.dynamic[0].mallocs == (0, 2, 5) and len(again.dynamic) == 1
    assert judge_addresses(amended(again, "auto")[0]) == ()


def test_few_bytes_or_most_of_the_requests_are_not_made_dynamic() -> None:
    resized = Resized()
    for _ in range(MISSED_STEPS):
        resized.end_step(SimpleNamespace(planned_bytes=1000 * BLOCK_BYTES), [(3, BLOCK_BYTES)])
    assert not resized.lasts(100) and resized.largest == {}
    for size in (5, 7, 6)[:MISSED_STEPS]:
        resized.end_step(SimpleNamespace(planned_bytes=1000 * BLOCK_BYTES), [(3, size * BLOCK_BYTES)])
    assert resized.lasts(100) and resized.largest == {3: 7 * BLOCK_BYTES}
    assert not resized.lasts(3)


NOT_FREED = 2**31 - 1


@pytest.mark.parametrize(
    ("came", "freed", "lives"),
    [
        ([0, 1, 2, 3], [1, 2, 4, 4], None),
        ([0, 1, 2, 3], [3, 2, 4, NOT_FREED], {0: (0, 6), 3: (7, 12)}),  # the first is freed after the third has come
        ([0, 1, 3, 2], [1, 2, 4, 4], {3: (3, 9)}),  # the last has come before the third, and lives from the second on
        ([0, 1, -1, 2], [1, 2, -1, 3], None),
        ([1, 2, 3, 0], [2, 3, 4, -1], {3: (0, 9)}),  # it had no block: only when it came is known
        ([3, 0, 1, 2], [-1, 1, 3, 4], {0: (0, 8), 1: (3, 4)}),  # the first has come last
    ],
)
def test_lives_of_another_step_lengthen_those_of_the_plan(
    came: list[int], freed: list[int], lives: dict[int, tuple[int, int]] | None
) -> None:
    before = {0: (0, 2), 1: (3, 4), 2: (5, 9), 3: (7, 9), 4: (0, 12)}
    table = buffers(np.array([[*life, 1] for life in before.values()], np.int64))
    table["outlives"][4] = True
    changed = with_lives(Problem(buffers=table), np.arange(4), np.array(came), np.array(freed))
    if lives is None:
        assert changed is None
        return
    found = zip(changed.buffers["lower"].tolist(), changed.buffers["upper"].tolist(), strict=True)
    assert dict(enumerate(found)) == before | lives


@given(st.data())
def test_blocks_in_use_together_are_so_in_the_lengthened_plan(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    whole = st.integers(1, 5)
    times = np.cumsum([data.draw(whole) for _ in range(count)])
    table = buffers(np.array([[time, time + data.draw(whole), 1] for time in times.tolist()], np.int64))
    order = data.draw(st.permutations(range(count)))[: data.draw(st.integers(0, count))]
    came, freed = np.full(count, -1), np.full(count, -1)
    for at, request in enumerate(order):
        came[request] = at
        freed[request] = data.draw(st.sampled_from([-1, *range(at + 1, len(order) + 1), NOT_FREED]))
    changed = with_lives(Problem(buffers=table), np.arange(count), came, freed)
    found = table if changed is None else changed.buffers
    assert (found["lower"] <= table["lower"]).all() and (found["upper"] >= table["upper"]).all()
    for one in order:
        for other in order:
            if came[one] < came[other] < freed[one]:  # `one` was in use when `other` came
                assert max(found["lower"][[one, other]]) < min(found["upper"][[one, other]]), (one, other)
    if changed is not None:
        assert with_lives(changed, np.arange(count), came, freed) is None


@pytest.mark.parametrize(
    ("inputs", "unknown"),
    [
        (((1, 10, 3),), False),
        (((1, 20, 3),), False),  # the second dimension varied among the recorded steps
        (((2, 10, 3),), True),
        (((2, 10),), False),  # another program's
        (((1, 10, 3), (2, 10, 3)), False),  # of a micro-batch that was not recorded
        ((), False),
    ],
)
def test_input_sizes_are_unknown_where_all_recorded_steps_were_alike(
    inputs: tuple[tuple[int, ...], ...], unknown: bool
) -> None:
    recorded = SimpleNamespace(input_sizes=((1, 10, 3),))
    problem = SimpleNamespace(terms=((), (1,)), fingerprint=recorded)
    assert has_unknown_sizes(problem, inputs) == unknown
