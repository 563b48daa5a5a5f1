"""Plans offload the bytes that they predict, and fill a binding host budget without exceeding it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import memplug
from memplug.session.table import Stage
from memplug.tokenwise import planning, predictions
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.plan.decisions import Decisions
from tests.support.blocks import LAYERS, Block, Layer, Stack, assert_same, gradients, twin
from tests.support.forwards import WritesAfterUse, WritesInput
from tests.support.parallel import Parallel

WARN = predictions.Predictions.warn  # the warning that users get; in tests it raises


class ByNumpy(Layer):
    """A layer with work that no operator shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x))
        doubled = torch.empty_like(y)
        doubled.detach().numpy()[:] = 2 * y.detach().numpy()
        return x + self.out(y.sigmoid() + doubled)


class Sorts(Layer):
    """A layer with a choice by values; memplug always captures it, so that a recompute pass repeats the choice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x))
        top, which = y.topk(4)
        return x + self.out(y.scatter(-1, which, top.sigmoid()))


@pytest.fixture(autouse=True)
def link(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the link's rate in bytes per second; the first rate is too high to limit a plan."""

    def of_rate(rate: float) -> None:
        monkeypatch.setattr("memplug.device.device.Device.link_rates", lambda device: (rate, rate))

    of_rate(1e15)
    return of_rate


def trained(
    layer: type[Layer] | Any, micro_batches: int = 1, tokens: int = 12, exact: bool = True, **block: Any
) -> dict[str, Any]:
    """Train with memplug, compare gradients, and return the report; refusals and peak are those of the last steps."""
    torch.manual_seed(0)
    model = Stack(4, layer)
    reference = twin(model)
    config = {
        "enabled": True,
        "plan_dir": False,
        "arena": {"enabled": False},
        "tokenwise": {"regions": LAYERS, "min_offload_bytes": 1},
        **block,
    }
    with memplug.attach(model, config) as session:

        def step() -> None:
            for x in torch.randn(micro_batches, 2, tokens // 2, 16):
                model(x).backward()
                reference(x).backward()
            assert_same(gradients(model), gradients(reference), exact)
            session.step()

        while session.stage is not Stage.STABLE:
            step()
        executor = session._attached.executor
        refusals = executor.transfer.refused  # refused before there was a plan
        executor.pool.rows.peak_bytes = 0
        for _ in range(3):
            step()
        report = session.report().as_dict()
        return {**report, "host_refusals": report["host_refusals"] - refusals}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("rate", [1e15, 1.0])
@pytest.mark.parametrize("layer", [Block, ByNumpy, Sorts, Parallel, WritesAfterUse, WritesInput])
def test_plan_offloads_exactly_the_predicted_bytes(
    layer: type[Layer], rate: float, micro_batches: int, link: Callable[[float], None], group: Any
) -> None:
    link(rate)
    report = trained(layer, micro_batches=micro_batches)
    assert report["offloaded_step_bytes"] == report["expected_step_bytes"] > 0
    assert report["offloaded_step_bytes"] <= micro_batches * report["predicted_host_bytes"], (
        "the prediction includes padding"
    )
    assert report["opaque_regions"] == (4 if layer is ByNumpy else 0)


def test_memo_plan_offloads_one_fraction_as_predicted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    block = {"regions": LAYERS, "min_offload_bytes": 1, "alpha": "memo"}
    report = trained(Block, tokenwise=block)
    assert report["offloaded_step_bytes"] == report["expected_step_bytes"] > 0
    assert report["alpha"] == "memo" and report["swapped_fraction"] > 0.8, (
        "the link is fast enough for nearly everything"
    )
    assert report["replans"] == 1
    assert ", at alpha 1.000" in caplog.text


def test_plan_swaps_only_the_input_of_an_opaque_region() -> None:
    opaque, seen = trained(ByNumpy), trained(Block)
    inputs = 2 * 4 * 12 * 16  # 2 of 4 layers: the first's input needs no gradient, the last's stays
    assert opaque["offloaded_step_bytes"] == inputs < seen["offloaded_step_bytes"]
    assert opaque["predicted_regions_s"] == pytest.approx(opaque["predicted_full_recomputation_s"], rel=0.01)


def test_wrong_prediction_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(predictions.Predictions, "warn", WARN)
    put = planning.put

    def untrue(decisions: Decisions | None, regions: Sequence[Region], executor: Executor) -> None:
        """Make regions expect to offload more than they do."""
        put(decisions, regions, executor)
        for region in regions:
            region.native.forward_bytes = region.native.forward_bytes and region.native.forward_bytes + 1000

    monkeypatch.setattr(planning, "put", untrue)
    with caplog.at_level(logging.WARNING):
        report = trained(Block)
    assert report["offloaded_step_bytes"] == report["expected_step_bytes"] - 3000
    assert len([record for record in caplog.records if "a step under a plan offloaded" in record.message]) == 1


@pytest.fixture(scope="module")
def endless_link() -> Iterator[None]:
    """Make the link so fast that only host memory binds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memplug.device.device.Device.link_rates", lambda device: (1e15, 1e15))
        yield


@pytest.fixture(scope="module")
def wanted_bytes(endless_link: None) -> int:
    """Return the host memory that a plan uses if there is plenty."""
    return trained(Block, tokens=1024, exact=False)["predicted_host_bytes"]


@pytest.mark.parametrize("percent", range(5, 101, 5))
def test_binding_host_budget_is_filled_without_refusals(percent: int, wanted_bytes: int) -> None:
    budget = wanted_bytes * percent // 100
    # gradients are not exact, since matmuls of some numbers of rows round differently; only one plan is tried, since
    # the fastest of several may swap less
    first = {"policy_steps": 0}
    report = trained(Block, tokens=1024, exact=False, host_budget_gib=budget / 2**30, profiler=first)
    assert report["host_refusals"] == 0 and report["swapped_share"] == 1.0
    assert report["host_peak_bytes"] <= report["host_pool_bytes"] <= report["host_budget_bytes"]
    assert report["host_pool_bytes"] <= 1.02 * report["predicted_host_bytes"]
    assert report["host_peak_bytes"] >= 0.98 * report["predicted_host_bytes"]
    if percent < 100:
        assert report["bound"] == "host" and report["predicted_host_bytes"] >= 0.98 * budget
