"""A plan is amended, without a new recording, where dynamic requests find too little room."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import memplug
from memplug.arena.amending import MISSED_STEPS, MOST_GROWTH, Lack
from memplug.arena.judge import judge_addresses
from memplug.arena.plan.problem import Problem, buffers
from memplug.arena.planning import amended, planned
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
            plan, _ = amended(plan, lack.with_more_room(plan.problem), "auto")
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


def test_session_amends_its_plan_where_more_tokens_take_part_than_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Part() for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    random = np.random.default_rng(0)

    def train(steps: int, most: float) -> None:
        for _ in range(steps):
            for layer in model:
                layer.share = random.uniform(most - 0.1, most)
            model(torch.randn(512, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()

    with memplug.attach(model, BLOCK) as session:
        train(12, 0.5)
        first = session.report().arena
        train(40, 0.7)
        report = session.report().arena
        arena = session._attached.boundary.followers.find("arena")
        assert arena.step.dynamic > 0 and arena.step.dynamic_missed_bytes == 0
    assert first.state == "serving" and first.dynamic > 0
    assert report.plans == first.plans == 1 and report.amendments > first.amendments
    assert report.bytes > first.bytes
