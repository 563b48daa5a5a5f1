"""Tensors that live from step to step, offloaded between uses: optimizer states, parameters, gradients."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memplug
from tests.support.swapped import GIB, Wide, block, train

pytestmark = pytest.mark.device

SWAP = {"enabled": True, "min_bytes": 1, "states": True}
STEPS = 14


@functools.cache
def most_bytes(kind: str) -> int:
    """Return the bytes that a step with all tensors on the device adds to the bytes in use before it."""
    before_bytes = in_use_bytes()
    return train(kind, block(1000.0, swap=SWAP), STEPS).peak_bytes - before_bytes


def in_use_bytes() -> int:
    """Return the device bytes that earlier tests have left in use."""
    gc.collect()
    return torch.cuda.memory_allocated() if torch.get_default_device().type == "cuda" else 0


def budget_of(share: float, kind: str = "wide") -> int:
    """Return a budget in bytes: a share of what a step adds, on top of the bytes in use."""
    return int(share * most_bytes(kind)) + in_use_bytes()


@pytest.mark.parametrize("share", [0.75, 0.56])
def test_training_with_swapped_states_is_bit_identical_within_budget(share: float) -> None:
    reference = train("wide", None, STEPS)
    budget_bytes = budget_of(share)
    swapped = train("wide", block(budget_bytes / GIB, swap=SWAP), STEPS)
    assert swapped.losses == reference.losses
    for one, other in zip(swapped.parameters, reference.parameters, strict=True):
        assert torch.equal(one, other)
    report = swapped.report
    assert report["swap"] == "swapping" and report["swap_repeated"] > 0
    assert swapped.peak_bytes == report["swap_peak_bytes"] == report["predicted_swap_peak_bytes"] <= budget_bytes
    assert report["swap_demanded"] == report["swap_cancelled"] == report["swap_refused"] == 0
    assert report["swap_released_bytes"] == report["swap_prefetched_bytes"] > 0
    assert report["swap_planned_state_bytes"] > 0 or share > 0.6


def test_frozen_weights_are_swapped_between_forward_and_backward() -> None:
    reference = train("adapted", None, STEPS)
    budget_bytes = budget_of(0.6, "adapted")
    swapped = train("adapted", block(budget_bytes / GIB, swap={**SWAP, "min_bytes": 10_000}), STEPS)
    assert swapped.losses == reference.losses
    for one, other in zip(swapped.parameters, reference.parameters, strict=True):
        assert torch.equal(one, other)
    report = swapped.report
    assert report["swap"] == "swapping" and report["swap_repeated"] > 0
    assert swapped.peak_bytes == report["predicted_swap_peak_bytes"] <= budget_bytes
    assert report["swap_missed"] == report["swap_demanded"] == report["swap_cancelled"] == 0
    outputs_bytes, weights_bytes = 250 * 256 * 4, 256 * 256 * 4
    more_bytes = report["swap_planned_bytes"] - report["swap_tensors"] * outputs_bytes
    assert more_bytes > 0 == more_bytes % (weights_bytes - outputs_bytes)  # so both outputs and weights are swapped


Between = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]
"""Called after a backward, in place of the optimizer's step; its session is None without memplug."""


def run(
    steps: list[Between], budget_gib: float | None, **optimizer: Any
) -> tuple[list[np.ndarray], list[dict[str, Any]]]:
    """Train one step for each entry of `steps`; without a budget, train without memplug.

    Returns:
        The parameters and the optimizer's states at the end, and a report for each step.
    """
    gc.collect()
    torch.manual_seed(0)
    model = Wide()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer)
    session = memplug.attach(model, block(budget_gib, swap=SWAP)) if budget_gib is not None else None
    reports = []
    for number, between in enumerate(steps):
        torch.manual_seed(number)
        model(torch.randn(1024, 256)).backward()
        between(model, adam, session)
        adam.zero_grad()
        if session is not None:
            session.step()
            reports.append(session.report().as_dict())
    if session is not None:
        session.detach()
    states = [value for parameter in model.parameters() for value in adam.state[parameter].values()]
    return [tensor.detach().cpu().numpy().copy() for tensor in (*model.parameters(), *states)], reports


def update(model: nn.Module, adam: torch.optim.Optimizer, session: Any) -> None:
    adam.step()


def skip(model: nn.Module, adam: torch.optim.Optimizer, session: Any) -> None:
    """Skip the optimizer's step, as trainers do if gradients are not finite."""


def clip(model: nn.Module, adam: torch.optim.Optimizer, session: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    adam.step()


def load(model: nn.Module, adam: torch.optim.Optimizer, session: Any) -> None:
    """Load the optimizer's states into new tensors, and take its step."""
    adam.load_state_dict(copy.deepcopy(adam.state_dict()))
    adam.step()


def evaluate(model: nn.Module, adam: torch.optim.Optimizer, session: Any) -> None:
    with torch.no_grad():
        model(torch.randn(16, 256))
    adam.step()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("between", [skip, clip, load, evaluate])
def test_states_stay_correct_if_steps_skip_clip_reload_or_evaluate(between: Between, foreach: bool) -> None:
    steps = [*[update] * 10, between, *[update] * 3, between, between, *[update] * 3]
    expected, _ = run(steps, None, foreach=foreach)
    found, reports = run(steps, budget_of(0.75) / GIB, foreach=foreach)
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    assert reports[9]["swap"] == "swapping" and reports[9]["swap_repeated"] > 0 == reports[9]["swap_demanded"]
    assert reports[-1]["swap_refused"] == 0


def test_detach_during_a_step_restores_all_values() -> None:
    def detach(model: nn.Module, adam: torch.optim.Optimizer, session: Any) -> None:
        if session is not None:
            assert session.report().swap.repeated > 0
            session.detach()
        adam.step()

    steps = [*[update] * 10, detach]
    expected, _ = run(steps, None)
    found, _ = run(steps, budget_of(0.75) / GIB)
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
