"""From observed steps to plans and back: the planner's input, and the regions' settings."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from memplug.device.device import Device
from memplug.tokenwise import planning
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.plan import solver as plan
from memplug.tokenwise.plan.decisions import Decision, Decisions, Setting
from tests.support.blocks import Block, Layer, Stack
from tests.support.forwards import Branches, Plain, ReusesOutput, Transposes

GIB = 1 << 30


# -- observing ---------------------------------------------------------------------------------------------------------


class Observed:
    """One timed step of a stack, every layer a region at the safest setting."""

    def __init__(
        self,
        model: nn.Module,
        forwards: int = 1,
        width: int = 16,
        backward: bool = True,
        min_offload_bytes: int = 1,
        observer: type[planning.StepObserver] = planning.StepObserver,
    ):
        self.executor = Executor(Device(), GIB, min_offload_bytes)
        self.observer = observer(self.executor.flow.is_large)
        self.executor.time_forwards(self.observer)
        self.regions = [Region(f"layers.{i}", type(layer).__name__, 0.0) for i, layer in enumerate(model.layers)]
        for layer, region in zip(model.layers, self.regions, strict=True):
            layer.forward = self._through(region, layer.forward)
        self.model = model
        losses = [model(torch.randn(2, 6, width)) for _ in range(forwards)]
        if backward:
            sum(losses).backward()
        self.groups = planning.group_regions(self.regions, self.observer)

    def _through(self, region: Region, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: self.executor.run(region, call, args, {})

    def put(self, solution: plan.TokenwisePlan) -> Decisions:
        decisions = planning.decisions_of(solution, self.groups, self.observer)
        planning.put(decisions, self.regions, self.executor)
        return decisions

    def describe(self) -> list[plan.PlannedRegion]:
        return planning.describe(self.groups, self.observer, self.executor)


ROOMY = plan.Budget(d2h_bytes_per_s=1e12, h2d_bytes_per_s=1e12, host_bytes=GIB, device_bytes=0)


def test_observer_keeps_only_tapes_of_timed_forwards() -> None:
    observed = Observed(Stack(2))
    kept = dict(observed.observer.tapes)
    observed.executor.time_forwards(None)
    observed.model(torch.randn(2, 6, 16)).backward()
    assert observed.observer.tapes == kept


def test_equal_layers_are_planned_together_and_counted_per_forward() -> None:
    (one,) = Observed(Stack(4)).describe()
    (two,) = Observed(Stack(4), forwards=2).describe()
    assert (one.instances, two.instances) == (4, 8)


def test_layers_with_different_operators_are_planned_separately() -> None:
    model = Stack(4)
    model.layers[2] = Block(in_place=True)
    model.layers[3] = Block(bias=False)
    observed = Observed(model)
    assert [len(members) for members in observed.groups.values()] == [2, 1, 1]
    assert {region.key: region.instances for region in observed.describe()} == {
        key: len(members) for key, members in observed.groups.items()
    }


def test_region_key_does_not_depend_on_shapes() -> None:
    """Ranks with different sequence lengths share a plan, so the key names operators, not shapes."""
    keys = {
        next(iter(Observed(Stack(2)).groups)),
        next(iter(Observed(Stack(2, lambda: Block(width=32)), width=32).groups)),
    }
    assert len(keys) == 1
    (key,) = keys
    assert key.startswith("Block:") and len(key) == len("Block:") + 12


def test_planner_gets_bytes_times_and_captures_of_operators() -> None:
    (region,) = Observed(Stack(3)).describe()
    by_name: dict[str, list[plan.PlannedOperator]] = {}
    for operator in region.operators:
        by_name.setdefault(operator.name.split(".")[1], []).append(operator)
    tokens, width = 2 * 6, 16
    matmuls = [operator for operator in region.operators if operator.capture == "rows"]
    assert sorted(o.output_bytes for o in matmuls) == sorted(4 * tokens * w for w in (48, 16, 32, 32, 16))
    assert all("mm" in operator.name and operator.time_s > 0 for operator in matmuls)
    attention = [operator for operator in region.operators if operator.always_swapped]
    assert len(attention) == 1 and attention[0].capture == "whole"
    views = [operator for name in ("view", "t", "transpose", "permute") for operator in by_name.get(name, [])]
    assert views and all(operator.inputs == () and operator.capture == "never" for operator in views)
    assert 3 * region.input_bytes == 2 * 4 * tokens * width, (
        "the mean: the first layer's input is the batch, which is not swapped"
    )
    assert 0 < sum(operator.time_s for operator in region.operators) <= region.forward_s
    assert region.backward_s > 0
    plan.solve([region], ROOMY)  # the solver accepts the description


def test_forward_without_backward_is_still_described_to_the_planner() -> None:
    (region,) = Observed(Stack(3), backward=False).describe()
    assert region.backward_s == pytest.approx(2 * region.forward_s, rel=2.0)
    plan.solve([region], ROOMY)


def test_planner_may_not_capture_small_tensors() -> None:
    (region,) = Observed(Stack(2), min_offload_bytes=4 * 12 * 32).describe()
    assert {o.output_bytes for o in region.operators if o.capture != "never"} == {4 * 12 * 32, 4 * 12 * 48}


class Draws(Layer):
    """A layer whose backward needs no random number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x) + self.out(self.inner(self.norm(x)).sigmoid())


@pytest.mark.parametrize("layer", [Plain, ReusesOutput, Transposes, Branches, Draws])
def test_planner_and_core_find_the_same_operators_to_run(layer: type[nn.Module]) -> None:
    found: list[Any] = []

    class Keeping(planning.StepObserver):
        def __call__(self, region: Region, frame: Any, tape: Any) -> None:
            super().__call__(region, frame, tape)
            found.append(frame)

    observed = Observed(Stack(1, layer), observer=Keeping)
    loss = observed.model(torch.randn(2, 6, 16))
    (region,), frame, chooses = observed.describe(), found[-1], random.Random(0)
    capturable = [index for index, operator in enumerate(region.operators) if operator.capture != "never"]
    for _ in range(20):
        captured = chooses.sample(capturable, chooses.randint(0, len(capturable)))
        frame.decide(dict.fromkeys(captured, True), [])
        runs = {index for index, action in enumerate(frame.actions) if action == 0}
        assert plan.needed(region.operators, region.saved, region.given, captured) == runs
    assert loss.requires_grad, "the graph keeps the saved tensors alive"


class Grouped(nn.Module):
    """A layer with a grouped matmul: each of two groups has some consecutive rows, or a matrix of a stack."""

    def __init__(self, stacked: bool):
        super().__init__()
        self.stacked, self.weight = stacked, nn.Parameter(torch.randn(2, 16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.full((2,), 6, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        y = torch._grouped_mm(*((x, self.weight) if self.stacked else (x.flatten(0, 1), self.weight, ends)))
        return x + y.view_as(x).sigmoid()


@pytest.mark.parametrize(("stacked", "capture"), [(False, "rows"), (True, "whole")])
def test_grouped_matmul_of_stacked_matrices_is_captured_whole(stacked: bool, capture: str) -> None:
    (region,) = Observed(Stack(2, lambda: Grouped(stacked))).describe()
    assert [each.capture for each in region.operators if "_grouped_mm" in each.name] == [capture]


# -- applying ----------------------------------------------------------------------------------------------------------


def solution_for(region: plan.PlannedRegion, groups: list[plan.Group]) -> plan.TokenwisePlan:
    planned = plan.RegionPlan(groups=tuple(groups), forward_s=1.0, backward_s=1.0)
    return plan.TokenwisePlan(
        regions={region.key: planned},
        alpha=None,
        alpha_cut_by_host=False,
        inputs_swapped=True,
        forward_s=1.0,
        backward_s=1.0,
        step_s=2.0,
        host_bytes=0,
        device_bytes=0,
        in_flight_bytes=0,
        bound="none",
    )


def group(instances: int, fractions: dict[int, float], keep: tuple[int, ...] = ()) -> plan.Group:
    return plan.Group(
        instances=instances,
        fractions=fractions,
        keep=frozenset(keep),
        runs=frozenset(),
        swapped_bytes=0,
        kept_bytes=0,
        recompute_s=0.0,
    )


def decided(region: Region, index: int, func: Any) -> tuple[float, bool]:
    """Return which fraction of operator `index`'s output is swapped, and whether the output stays on the device."""
    return region.native.decide(index, func._schema.name, func._schema.overload_name)


def test_layers_get_their_decisions_in_forward_order() -> None:
    observed = Observed(Stack(4))
    (region,) = observed.describe()
    rows = [i for i, operator in enumerate(region.operators) if operator.capture == "rows"]
    groups = [group(3, {rows[0]: 0.5}), group(1, {}, keep=(rows[1],))]
    observed.put(solution_for(region, groups))
    tape = observed.observer.tapes["layers.0"]
    first, second = tape.records[rows[0]].func, tape.records[rows[1]].func
    for member in observed.regions[:3]:
        assert member.setting.plan == {
            rows[0]: Decision(str(first).removesuffix(".default").replace(".", "::", 1), 0.5)
        }
        assert decided(member, rows[0], first) == (0.5, False)
        assert decided(member, rows[1], second) == (0.0, False)
    assert decided(observed.regions[3], rows[1], second) == (1.0, True)
    assert decided(observed.regions[3], rows[0], first) == (0.0, False)


def test_forwards_in_flight_of_a_layer_share_its_decisions() -> None:
    observed = Observed(Stack(4), forwards=2)
    (region,) = observed.describe()
    rows = [i for i, operator in enumerate(region.operators) if operator.capture == "rows"]
    observed.put(solution_for(region, [group(4, {rows[0]: 1.0}), group(4, {})]))
    assert [bool(member.setting.plan) for member in observed.regions] == [True, True, False, False]


def test_unplanned_program_swaps_the_same_share_of_rows_as_the_plan() -> None:
    observed = Observed(Stack(2))
    (region,) = observed.describe()
    sizes = {i: o.output_bytes for i, o in enumerate(region.operators) if o.capture == "rows"}
    chosen = max(sizes, key=sizes.__getitem__)
    observed.put(solution_for(region, [group(2, {chosen: 0.5})]))
    share = 0.5 * sizes[chosen] / sum(sizes.values())
    member = observed.regions[0]
    assert member.setting.rows == pytest.approx(share)
    assert decided(member, 10_000, observed.observer.tapes["layers.0"].records[chosen].func) == (0.0, False)
    addmm = torch.ops.aten.addmm.default
    other = next(i for i, r in enumerate(observed.observer.tapes["layers.0"].records) if r.func is not addmm)
    planned = {other: Decision(str(observed.observer.tapes["layers.0"].records[other].func), 1.0)}
    member.set(replace(member.setting, plan=planned))
    assert decided(member, other, addmm) == (member.setting.rows, False)


def test_regions_that_the_plan_does_not_name_stay_at_the_safest_setting() -> None:
    observed = Observed(Stack(2))
    (region,) = observed.describe()
    observed.groups = {"other": observed.regions}
    observed.put(solution_for(region, [group(2, {})]))
    assert all(member.setting == Setting("Block") for member in observed.regions)


def test_decisions_can_be_withdrawn_and_applied_again() -> None:
    observed = Observed(Stack(3))
    (region,) = observed.describe()
    rows = next(i for i, operator in enumerate(region.operators) if operator.capture == "rows")
    decisions = observed.put(solution_for(region, [group(1, {rows: 0.5}), group(2, {}, keep=(rows,))]))
    run_by = [member.setting for member in observed.regions]
    for member in observed.regions:
        member.native.leave_out(rows, "aten::mm")
    assert all(member.native.unneeded == {rows: "aten::mm"} for member in observed.regions)
    planning.put(None, observed.regions, observed.executor)
    assert [(each.setting, each.native.unneeded) for each in observed.regions] == [(Setting("Block"), {})] * 3
    planning.put(decisions, observed.regions, observed.executor)
    assert [member.setting for member in observed.regions] == run_by


def test_only_kept_outputs_that_backward_reads_stay_captured() -> None:
    observed = Observed(Stack(2))
    (region,) = observed.describe()
    kept = {index for index, operator in enumerate(region.operators) if operator.capture != "never"}
    read = {index for index, operator in enumerate(region.operators) if set(operator.outputs) & region.saved}
    observed.put(solution_for(region, [group(2, {}, keep=tuple(kept))]))
    for _ in range(3):
        observed.model(torch.randn(2, 6, 16)).sum().backward()
        assert all(set(each.native.unneeded) == kept - read for each in observed.regions)
    assert read & kept and kept - read


class Doubled(Block):
    """A layer whose backward needs no output of its last two matmuls: keeping takes fewer bytes than recomputing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + torch.tanh(self.out(self.norm1(x)) * 2.0)


@pytest.mark.parametrize("block", [Block, Doubled])
def test_kept_outputs_do_not_change_the_bytes_in_flight(block: Callable[[], nn.Module]) -> None:
    observed = Observed(Stack(4, block))
    (region,) = observed.describe()

    def offloading_bytes() -> int:
        loss = observed.model(torch.randn(2, 6, 16))
        resident_bytes = observed.executor.transfer.resident_bytes
        loss.backward()
        return resident_bytes

    safest = [offloading_bytes() for _ in range(3)]
    swapped = {index: 1.0 for index, operator in enumerate(region.operators) if operator.always_swapped}
    capturable = {index for index, operator in enumerate(region.operators) if operator.capture != "never"}
    observed.put(solution_for(region, [group(4, swapped, keep=tuple(capturable - set(swapped)))]))
    assert [offloading_bytes() for _ in range(3)] == safest and safest[0] > 0


def test_decisions_predict_the_peak_from_the_observed_one() -> None:
    observed = Observed(Stack(2))
    (region,) = observed.describe()
    solution = replace(solution_for(region, [group(2, {})]), device_bytes=30)
    assert planning.decisions_of(solution, observed.groups, observed.observer, 100).peak_bytes == 130
    assert planning.decisions_of(solution, observed.groups, observed.observer, None).peak_bytes is None
