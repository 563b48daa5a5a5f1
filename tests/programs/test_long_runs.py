"""Thousands of steps, some of them awkward, leave nothing behind, by memplug's counts of tensors and bytes."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

import memplug
from memplug.session.table import Stage
from tests.support.awkward import LENGTHS, STEPS, Fails, awkward_steps, left_behind, live_tensors, plain
from tests.support.blocks import LAYERS, Stack, assert_same, gradients, twin

ROUND = len(STEPS) * len(LENGTHS)  # steps until every kind and length has occurred
ROUNDS_TO_PLAN = 5


@pytest.mark.parametrize("alpha", [0.0, 1.0, "auto"])
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.long)])
def test_awkward_steps_leave_nothing_behind(alpha: float | str, rounds: int) -> None:
    torch.manual_seed(0)
    earlier = live_tensors()
    model = Stack(3, Fails)
    tokenwise = {"regions": LAYERS, "min_offload_bytes": 1, "alpha": alpha}
    with memplug.attach(model, {"enabled": True, "plan_dir": False, "tokenwise": tokenwise}) as session:
        while session.stage is not Stage.STABLE:
            plain(model, torch.randn(2, LENGTHS[0], 16))
            session.step()
        steps = awkward_steps(model)

        def run(count: int) -> None:
            for _ in islice(steps, count):
                session.step()

        run(ROUNDS_TO_PLAN * ROUND)  # until each kind and length has its plan, and memplug all memory that it needs
        before = left_behind(session._attached.executor, earlier)
        for _ in range(rounds):
            run(ROUND)
        after = left_behind(session._attached.executor, earlier)
        forwards = session._attached.executor.flow.forwards
        assert forwards > 3 * rounds * ROUND, "memplug runs every region"
        assert after == before
        reference = twin(model)
        x = torch.randn(2, 6, 16)
        model(x).backward()
        reference(x).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha != "auto")
