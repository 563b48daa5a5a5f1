"""Whole trainings within less memory than a step takes: the same numbers to the bit, and never more than the budget."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.support.swapped import GIB, MODELS, Trained, block, train

pytest.importorskip("transformers")
pytestmark = pytest.mark.device

SHARES = [
    0.9,
    pytest.param(0.8, marks=pytest.mark.long),
    pytest.param(0.7, marks=pytest.mark.long),
    pytest.param(0.6, marks=pytest.mark.long),
    0.5,
]


@functools.cache
def plain(kind: str) -> Trained:
    """Without memplug, and what a step takes with all tensors on the device."""
    trained = train(kind, None)
    roomy = train(kind, block(1000.0))
    assert roomy.losses == trained.losses
    assert roomy.report["swap"] == "fits" and roomy.report["swap_released_bytes"] == 0
    trained.peak_bytes = roomy.peak_bytes
    return trained


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_keeps_to_its_budget_with_the_same_numbers(kind: str, share: float) -> None:
    reference = plain(kind)
    budget_bytes = int(share * reference.peak_bytes)
    swapped = train(kind, block(budget_bytes / GIB))
    assert swapped.losses == reference.losses
    for one, other in zip(swapped.parameters, reference.parameters, strict=True):
        assert torch.equal(one, other)
    report = swapped.report
    assert report["swap_off_because"] is None and report["swap_tensors"] > 0
    assert swapped.peak_bytes <= budget_bytes
    assert report["predicted_swap_peak_bytes"] <= budget_bytes
    assert report["swap_missed"] == report["swap_demanded"] == report["swap_cancelled"] == report["swap_refused"] == 0
    assert report["swap_found"] % report["swap_tensors"] == 0
    assert report["swap_released_bytes"] == report["swap_prefetched_bytes"] > 0
