"""`device_budget_gib` is the most device memory that a step takes; a budget that no plan can keep to is refused."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import memplug
from memplug.errors import BudgetError
from memplug.session.table import Stage
from tests.support.blocks import LAYERS, Block, Stack, assert_same, gradients, twin
from tests.support.hosts import QUICK

GIB = 1 << 30
STEPS = 5
ALONE: dict[str, Any] = {"swap": {"enabled": False}}  # without the swap list, a budget that regions exceed is an error

pytestmark = pytest.mark.device


def train(budget_gib: float | str, **block: Any) -> dict[str, Any]:
    """Train with memplug, compare the gradients up to rounding, and return the report of the plan in force.

    Matmuls that are computed by rows round differently.
    """
    gc.collect()  # memory of an earlier training would count
    torch.manual_seed(0)
    model = Stack(4)
    reference = twin(model)
    config = {"enabled": True, "plan_dir": False, "device_budget_gib": budget_gib, "profiler": QUICK, **ALONE, **block}
    with memplug.attach(model, {**config, "tokenwise": {"regions": LAYERS, "min_offload_bytes": 1}}) as session:
        for _ in range(STEPS):
            x = torch.randn(16, 64, 16)
            model(x).backward()
            reference(x).backward()
            assert_same(gradients(model), gradients(reference), exact=False)
            session.step()
        assert session.stage is Stage.STABLE
        return session.report().as_dict()


def least_gib(**block: Any) -> float:
    with pytest.raises(BudgetError) as caught:
        train(1e-6, **block)
    assert f'Set "device_budget_gib" to {caught.value.least_gib:g} or more' in caught.value.advice
    return caught.value.least_gib


@pytest.mark.parametrize("arena", [True, False])
def test_training_at_the_least_budget_keeps_almost_no_outputs(arena: bool) -> None:
    block = {"arena": {"enabled": arena}}
    least = least_gib(**block)
    report = train(least, **block)
    assert report["predicted_peak_bytes"] <= least * GIB
    assert report["predicted_kept_bytes"] <= 0.01 * least * GIB and report["plain_regions"] == 0


@pytest.mark.parametrize("arena", [True, False])
def test_peak_stays_within_the_budget_and_larger_budgets_keep_more(arena: bool) -> None:
    """Without the arena a larger budget may go to rounding buffers first, which allow more swapping."""
    block = {"arena": {"enabled": arena}}
    least, everything = least_gib(**block), train(1.0, **block)
    assert everything["plain_regions"] == 4
    most = everything["predicted_peak_bytes"] / GIB
    kept = []
    for share in (0.25, 0.5, 0.75):
        budget_gib = least + share * (most - least)
        report = train(budget_gib, **block)
        assert report["predicted_peak_bytes"] <= budget_gib * GIB
        kept.append(report["predicted_kept_bytes"])
    assert kept[-1] < everything["predicted_kept_bytes"]
    assert kept == sorted(kept) or not arena
    if torch.get_default_device().type == "cpu":  # on a GPU, rounding buffers and torch's cache may take the rest
        assert kept[0] < kept[-1] and (kept[1] > 0 or not arena)


def test_model_trains_without_memplug_after_a_budget_error() -> None:
    torch.manual_seed(0)
    model = Stack(3)
    block = {"enabled": True, "plan_dir": False, "device_budget_gib": 1e-6, "profiler": QUICK, **ALONE}
    session = memplug.attach(model, {**block, "tokenwise": {"regions": LAYERS, "min_offload_bytes": 1}})

    def step() -> None:
        model(torch.randn(2, 6, 16)).backward()
        session.step()

    with pytest.raises(BudgetError):
        for _ in range(STEPS):
            step()
    session.detach()
    assert all(type(layer) is Block for layer in model.layers)
    model(torch.randn(2, 6, 16)).backward()
