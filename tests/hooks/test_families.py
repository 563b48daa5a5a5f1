"""Every model family of transformers trains as without memplug, with default arguments (`use_cache` included)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import memplug
from tests.support import families
from tests.support.families import Cannot, Family

FAMILIES = families.families()
STATEFUL = ("gemma3n_text", "gemma4_text", "qwen3_next", "nemotron_h", "jamba", "zamba2", "minimax", "mt5", "bart")
"""Families whose caches hold more than keys and values, are shared, or change the rounding."""
WITHOUT_REGIONS = ("albert",)
"""Families that call one layer again and again: memplug finds no layers that repeat."""
Steps = list[tuple[torch.Tensor, dict[str, torch.Tensor | None]]]


def cases() -> list[Any]:
    """Return all families; mark them long, except for the stateful ones and every sixteenth."""
    chosen = {str(family) for family in FAMILIES[::16]} | {str(each) for each in FAMILIES if each.name in STATEFUL}
    return [
        pytest.param(family, id=str(family), marks=[] if str(family) in chosen else pytest.mark.long)
        for family in FAMILIES
    ]


def block(alpha: float | str) -> dict[str, Any]:
    """Return a block that swaps even the smallest tensors."""
    tokenwise = {"alpha": alpha, "min_offload_bytes": 1}
    return {"enabled": True, "plan_dir": False, "arena": {"enabled": False}, "tokenwise": tokenwise}


def plain(family: Family) -> Steps:
    """Return losses and gradients without memplug.

    Raises:
        Cannot: the family does not train.
    """
    model = family.make()
    try:
        return list(families.steps(model))
    except Exception as error:
        raise Cannot(f"without memplug {type(error).__name__}: {error}"[:200]) from error


def difference(found: Steps, expected: Steps) -> str:
    """Return where losses or gradients of two trainings first differ in a bit; "" if they do not."""
    for step, ((loss, gradients), (other, others)) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(loss.nan_to_num(), other.nan_to_num()):
            return f"step {step}: loss {loss.item()}, expected {other.item()}"
        for name, gradient in others.items():
            one = gradients[name]
            if (one is None) != (gradient is None) or (
                gradient is not None and not torch.equal(one.nan_to_num(), gradient.nan_to_num())
            ):
                return f"step {step}: the gradient of {name}"
    return ""


@pytest.mark.parametrize("family", cases())
@pytest.mark.filterwarnings("ignore")
def test_model_family_trains_as_without_memplug(family: Family, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    try:
        expected = plain(family)
    except Cannot as error:
        pytest.skip(str(error))
    for alpha in (0, 1, "auto"):
        model = family.make()
        with memplug.attach(model, block(alpha)) as session:
            found = list(families.steps(model, session))
            if difference(found, expected) and difference(plain(family), expected):
                pytest.skip("training is not deterministic without memplug")
            assert not difference(found, expected), f"alpha {alpha}"
            assert session._attached.regions or family.name in WITHOUT_REGIONS
            assert session.report().tokenwise.forwards or not session._attached.regions, "a region ran"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_most_model_families_can_be_made_tiny() -> None:
    # notices a version of transformers for which most families would be skipped
    reasons = {}
    for family in FAMILIES:
        try:
            family.make()
        except Cannot as error:
            reasons[str(family)] = str(error)
    assert len(reasons) < 0.1 * len(FAMILIES), "\n".join(f"{name}: {reason}" for name, reason in reasons.items())
