"""`memplug.estimate` on the virtual device agrees with steps that run there, and with measurements."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memplug
from memplug.errors import BudgetError, EstimateError, HardwareError, RegionError
from memplug.predict.estimator.estimate import LASTING_STEPS
from memplug.predict.estimator.result import Estimate
from memplug.predict.estimator.training import VirtualTraining
from memplug.predict.virtual import GpuProfile, VirtualDevice
from tests.support.h200 import measured
from tests.support.virtual_devices import H200, HIDDEN, Layers

NO_LIST = {"swap": {"enabled": False}}
LAYERS = {"enabled": True, "tokenwise": {"regions": ["layers.*"]}, **NO_LIST}
GIB = 2**30


def _stack(layers: int) -> nn.Module:
    return Layers(layers).to(torch.bfloat16)


def _input() -> torch.Tensor:
    return torch.empty(1, 8192, HIDDEN, dtype=torch.bfloat16, device="meta")


def _estimated(layers: int, modes: tuple[str, ...], block: dict[str, Any] | None = None, **options: Any) -> Estimate:
    return memplug.estimate(lambda: _stack(layers), _input, block or LAYERS, "h200", modes, **options)


@pytest.fixture(scope="module")
def of_four() -> Estimate:
    return _estimated(4, ("keep", "full", "selective"))


@pytest.mark.parametrize("mode", ["keep", "full", "selective"])
def test_predicted_step_matches_h200_measurements(of_four: Estimate, mode: str) -> None:
    row = next(row for row in measured() if (row.tokens, row.layers, row.mode) == (8192, 4, mode))
    assert of_four[mode].step_s == pytest.approx(row.step_s, rel=0.03)
    assert of_four[mode].peak_allocated_bytes == pytest.approx(row.peak_allocated_bytes, rel=0.04)


def test_utilization_counts_model_flops_without_recomputation(of_four: Estimate) -> None:
    assert of_four.over_keep("keep") == 1 < of_four.over_keep("selective") < of_four.over_keep("full")
    assert 1.2 < of_four["full"].flops / of_four["keep"].flops < 4 / 3  # the last matmul is not recomputed
    share = of_four.utilization("full", 989e12)
    assert share == pytest.approx(of_four["keep"].flops / of_four["full"].step_s / 989e12)
    assert 0.3 < share < of_four.utilization("keep", 989e12) < 1
    for each in of_four.values():
        assert each.bound == "compute" and each.fits and each.to_host_bytes == each.host_bytes == 0
        assert 0 < sum(span.end_s - span.begin_s for span in each.spans) <= each.step_s
        assert all(0 <= span.queued_s <= span.begin_s < span.end_s <= each.step_s * 1.001 for span in each.spans)


def test_estimates_of_2_and_4_layers_extrapolate_to_6(of_four: Estimate) -> None:
    two, six = _estimated(2, tuple(of_four)), _estimated(6, tuple(of_four))
    for mode, four in of_four.items():
        for name, precision in (("step_s", 1e-3), ("peak_allocated_bytes", 1e-3), ("peak_reserved_bytes", 0.03)):
            few, more, many = (getattr(each, name) for each in (two[mode], four, six[mode]))
            assert many == pytest.approx(more + (more - few), rel=precision), (mode, name)


def test_memplug_swaps_to_stay_within_its_budget() -> None:
    keep = _estimated(4, ("keep",))["keep"]
    budget_bytes = int(0.75 * keep.peak_allocated_bytes)
    found = _estimated(4, ("memplug",), {**LAYERS, "device_budget_gib": budget_bytes / GIB})["memplug"]
    assert found.peak_allocated_bytes <= budget_bytes
    assert found.to_host_bytes == found.to_device_bytes > 0 and found.host_bytes > 0
    assert keep.step_s < found.step_s < 1.25 * keep.step_s
    assert {"to host", "to device"} <= {span.name for span in found.spans}
    assert 0 < found.arena_reserved_bytes < 1.1 * found.peak_reserved_bytes


def test_mode_that_does_not_fit_is_estimated_or_names_its_least_budget() -> None:
    small = dataclasses.replace(GpuProfile.read(H200), memory_bytes=9e9)
    found = memplug.estimate(lambda: _stack(4), _input, LAYERS, small, ("keep", "memplug"))
    assert not found["keep"].fits and found["keep"].peak_reserved_bytes > 9e9
    assert found["memplug"].fits and found["memplug"].peak_allocated_bytes <= 9e9
    smallest = dataclasses.replace(small, memory_bytes=1e9)
    least = memplug.estimate(lambda: _stack(4), _input, LAYERS, smallest, ("memplug",))["memplug"]
    assert not least.fits and least.peak_allocated_bytes < found["memplug"].peak_allocated_bytes
    asked = {**LAYERS, "device_budget_gib": 1}
    refused = memplug.estimate(lambda: _stack(4), _input, asked, small, ("memplug",)).impossible["memplug"]
    assert isinstance(refused, BudgetError)
    assert refused.least_gib * GIB == pytest.approx(least.peak_allocated_bytes, rel=0.1)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32, device="meta"), nn.Linear(32, 64, bias=False, device="meta")
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(ids))
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten())}


def test_moving_a_meta_model_keeps_shared_parameters_shared() -> None:
    VirtualDevice(GpuProfile.read(H200))
    training = VirtualTraining(
        _Tied, lambda: {"ids": torch.zeros(2, 8, dtype=torch.long, device="meta")}, torch.optim.SGD
    )
    training.step()
    assert training.model.head.weight is training.model.embed.weight
    assert {parameter.device.type for parameter in training.model.parameters()} == {"virtual"}
    keep = memplug.estimate(_Tied, lambda: (torch.zeros(2, 8, dtype=torch.long),), modes=("keep",))["keep"]
    assert keep.step_s > 0
    with pytest.raises(RegionError):
        memplug.estimate(_Tied, lambda: (torch.zeros(2, 8, dtype=torch.long),), modes=("full",))


class _NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[torch.unique(x).long()].sum()


class _FailsLater(nn.Module):
    """A model that fails in the forward that is measured."""

    forwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards > LASTING_STEPS:
            (x * self.weight).sum()
            raise RuntimeError("a forward that fails")
        return (x * self.weight).sum()


def test_failed_step_adds_no_spans_to_the_next_estimate() -> None:
    """Let a step fail while it is measured."""
    block = {"enabled": True, "arena": {"enabled": False}}
    with pytest.raises(EstimateError, match="a forward that fails"):
        memplug.estimate(_FailsLater, lambda: torch.ones(8), block, modes=("keep",))
    found = memplug.estimate(_Tied, lambda: (torch.zeros(2, 8, dtype=torch.long),), block, modes=("keep",))["keep"]
    assert found.spans and min(span.begin_s for span in found.spans) >= 0


class _Constant(_NeedsValues):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"make_model": _NeedsValues}, EstimateError, "unique"),
        ({"make_model": _Constant}, EstimateError, "nothing that needs a gradient"),
        ({"modes": ("kept",)}, EstimateError, "no mode 'kept'"),
        ({"gpu": "h201"}, HardwareError, "h200"),
        ({"attention": "none"}, HardwareError, "cudnn, flash"),
        ({"gpus": 8}, EstimateError, "gpus is 8, and no engine is given"),
        ({"engine": {}, "make_optimizer": torch.optim.SGD}, EstimateError, "makes its own optimizer"),
        ({"engine": {"zero_optimization": {"cpu_offload": True}}}, EstimateError, "leaves work to the host"),
        ({"plan_dir": "plans"}, EstimateError, "none of these modes makes a plan"),
    ],
)
def test_invalid_estimate_requests_raise_with_the_reason(
    arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    given = {"make_model": lambda: _stack(1), "example_inputs": lambda: torch.ones(8), "modes": ("keep",), **arguments}
    with pytest.raises(error, match=said):
        memplug.estimate(**given)
