"""Where the device has room for everything, regions run as they would without memplug; where it has no more, they do
not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import memplug
from memplug.plan import plain
from memplug.plan import tokenwise as plan
from memplug.stages.table import Stage
from tests.blocks import LAYERS, Block, Layer, Stack, assert_same, gradients, twin

pytestmark = pytest.mark.device

OPERATOR = plan.Operator(name="mm", time_s=1.0, inputs=(0,), outputs=(1,), output_bytes=100, capture="whole")
REGION = plan.Region(
    key="layer",
    instances=4,
    operators=(OPERATOR,),
    saved=frozenset({1}),
    given=frozenset({0}),
    input_bytes=10,
    forward_s=1.0,
    backward_s=2.0,
    saved_bytes=100,
)
BUDGET = plan.Budget(d2h_bytes_per_s=1.0, h2d_bytes_per_s=1.0, host_bytes=1000, device_bytes=440)


def test_a_plan_that_keeps_everything_takes_no_longer_than_the_program() -> None:
    solution = plain.solve([REGION], BUDGET)
    assert solution is not None and solution.step_s == 4 * 3.0
    assert (solution.host_bytes, solution.device_bytes) == (0, 440)
    assert solution == plan.TokenwisePlan.from_dict(solution.to_dict())


def test_there_is_none_where_a_byte_is_missing_or_a_region_is_unknown() -> None:
    assert plain.solve([REGION], replace(BUDGET, device_bytes=439)) is None
    assert plain.solve([REGION, replace(REGION, key="other", saved_bytes=0)], BUDGET) is None


class Training:
    """A model with a session, and its twin without."""

    def __init__(self, layer: type[Layer] | Any = Block, **block: Any):
        torch.manual_seed(0)
        self.model = Stack(4, layer)
        self.reference = twin(self.model)
        config = {"tokenwise": {"regions": LAYERS, "min_offload_bytes": 1}, "profiler": {"policy_steps": 1}, **block}
        config |= {"enabled": True, "plan_dir": False, "arena": {"enabled": False}}
        self.session = memplug.attach(self.model, config)

    def step(self, tokens: int = 6) -> int:
        """One step, whose gradients are the twin's; how many region forwards memplug ran."""
        before = self.session.executor.flow.forwards
        x = torch.randn(2, tokens, 16)
        self.model(x).backward()
        self.reference(x).backward()
        assert_same(gradients(self.model), gradients(self.reference))
        self.session.step()
        return self.session.executor.flow.forwards - before

    def reach_stable(self) -> None:
        for _ in range(20):
            if self.session.stage is Stage.STABLE:
                break
            self.step()
        assert self.session.stage is Stage.STABLE


def test_with_room_on_the_device_memplug_is_out_of_the_way() -> None:
    training = Training(device_budget_gib=1)
    with training.session as session:
        training.reach_stable()
        moved = session.executor.transfer.offloaded_total_bytes
        assert session.report()["plain_regions"] == 4
        assert [training.step() for _ in range(3)] == [0, 0, 0]
        assert session.stage is Stage.STABLE and session.executor.transfer.offloaded_total_bytes == moved
        assert session.report()["predicted_host_bytes"] == 0 < session.report()["predicted_kept_bytes"]


def test_functions_compiled_inside_of_a_plain_region_run_compiled() -> None:
    compiled_calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        def run(*args: Any) -> Any:
            compiled_calls.append(1)
            return graph(*args)

        return run

    @torch.compile(backend=backend)
    def activation(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    class Compiles(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(activation(self.inner(x)))

    training = Training(Compiles, device_budget_gib=1)
    with training.session as session:
        training.reach_stable()
        assert session.report()["plain_regions"] == 4
        before = len(compiled_calls)
        training.step()
        assert len(compiled_calls) - before == 8, "of the model, and of its twin"
    torch.compiler.reset()


def test_a_longer_sequence_finds_it_back_at_once() -> None:
    training = Training(device_budget_gib=1)
    with training.session as session:
        training.reach_stable()
        assert training.step(tokens=18) == 4, "in the very step that would keep more than was planned for"
        assert training.step(tokens=18) == 4
        assert session.stage is not Stage.STABLE and session.report()["plain_regions"] == 0
        while session.stage is not Stage.STABLE:
            training.step(tokens=18)
        assert session.report()["plain_regions"] == 4 and training.step(tokens=18) == 0


def test_ranks_that_are_given_more_launch_the_collectives_of_those_that_are_not() -> None:
    training = Training(device_budget_gib=1)
    with training.session as session:
        training.reach_stable()
        for region in session.regions:
            region.communicates = True  # its recompute pass would: the others have none
        assert training.step(tokens=18) == 0


def test_without_room_regions_are_not_plain() -> None:
    training = Training(device_budget_gib=1e-6)
    with training.session as session:
        training.reach_stable()
        assert session.report()["plain_regions"] == 0 and training.step() == 4


def test_tensors_that_were_kept_by_an_earlier_plan_are_found_by_their_backward() -> None:
    """A graph from before the regions were plain, and its backward after."""
    training = Training(device_budget_gib=1)
    with training.session as session:
        x = torch.randn(2, 6, 16)
        before, expected = training.model(x), training.reference(x)
        training.model.zero_grad()
        training.reach_stable()
        assert session.report()["plain_regions"] == 4
        before.backward()
        expected.backward()
        assert_same(gradients(training.model), gradients(training.reference))
