"""Ranks that exchange tokens, and that do not see alike what an expert hides: one without tokens sees nothing of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking import launch_forked

pytestmark = pytest.mark.distributed

EXCHANGES = 3 * 2 * 2  # of three layers: there and back, in forward and in backward
ALPHAS = (0.0, 1.0, "auto")


def ranks(folder: Path, layer: str, *routings: str) -> list[dict[str, Any]]:
    """What all ranks found, of every case."""
    cases = json.dumps([(layer, routing, alpha) for routing in routings for alpha in ALPHAS])
    launch_forked(["tests.support.hidden_worker", folder, cases], module=True, time_limit_s=120)
    found = [case for rank in (0, 1) for case in json.loads((folder / f"{rank}.json").read_text())]
    assert len(found) == 2 * len(routings) * len(ALPHAS)
    return found


def assert_right(case: dict[str, Any]) -> None:
    """Gradients are those without memplug, and no rank exchanges again by itself."""
    assert case["differ"] == []
    assert set(case["exchanges"]) == {EXCHANGES}


def test_a_function_is_a_unit_on_each_rank_from_its_first_tokens_on(tmp_path: Path) -> None:
    for case in ranks(tmp_path, "Function", "all, then half", "all for long", "in turn", "half"):
        assert_right(case)
        assert case["opaque"] == 0


def test_a_region_that_is_opaque_on_one_rank_keeps_what_it_saves(tmp_path: Path) -> None:
    for case in ranks(tmp_path, "NoFunction", "half"):
        assert_right(case)
        assert case["opaque"] == 3


def test_a_region_that_becomes_opaque_after_forwards_that_were_alike_is_an_error(tmp_path: Path) -> None:
    """And not a rank that waits for ever: nothing of that forward was kept."""
    with pytest.raises(RuntimeError, match="communicates, and a forward was opaque .* would leave the others waiting"):
        ranks(tmp_path, "Late", "half")
