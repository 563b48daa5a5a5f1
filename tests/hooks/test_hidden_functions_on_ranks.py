"""Ranks detect an expert's hidden function at different times: a rank without tokens for the expert never runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking import launch_forked

pytestmark = pytest.mark.distributed

STEPS, ALPHAS = 6, (0.0, 1.0, "auto")


def ranks(folder: Path, layer: str, *routings: str, layers: int = 3) -> list[dict[str, Any]]:
    """Return all ranks' results of every case."""
    cases = json.dumps([(layer, layers, routing, alpha) for routing in routings for alpha in ALPHAS])
    launch_forked(["tests.support.hidden_worker", folder, cases], module=True, time_limit_s=120)
    found = [case for rank in (0, 1) for case in json.loads((folder / f"{rank}.json").read_text())]
    assert len(found) == 2 * len(routings) * len(ALPHAS)
    return found


def assert_right(case: dict[str, Any], layers: int = 3, without: tuple[int, ...] = ()) -> None:
    """Assert that gradients equal those without memplug, and that no rank repeats an exchange alone.

    Each layer exchanges tokens there and back, in forward and in backward, except in the steps `without`.
    """
    assert case["differ"] == []
    assert case["exchanges"] == [0 if step in without else layers * 2 * 2 for step in range(STEPS)]


@pytest.mark.long
def test_function_is_a_unit_on_a_rank_once_the_rank_has_had_tokens(tmp_path: Path) -> None:
    for case in ranks(tmp_path, "Function", "all, then half", "all for long", "in turn", "half"):
        assert_right(case)
        assert case["opaque"][-1] == 0


@pytest.mark.long
@pytest.mark.parametrize("layer", ["NoFunction", "ExchangeUnit"])
def test_opaque_communicating_region_keeps_its_saved_tensors_on_device(layer: str, tmp_path: Path) -> None:
    for case in ranks(tmp_path, layer, "half"):
        assert_right(case)
        assert case["opaque"][-1] == 3


@pytest.mark.long
@pytest.mark.parametrize("layers", [1, 3])
def test_region_opaque_on_one_rank_keeps_its_saved_tensors_on_device(layers: int, tmp_path: Path) -> None:
    # with three layers, the layers' class turns opaque between two regions of one step
    found = ranks(tmp_path, "NoFunction", "all, then half", layers=layers)
    for case in found:
        assert_right(case, layers=layers)
        assert case["opaque"][-1] == layers
    opaque = [case["opaque"][0] for case in found]
    assert opaque == 3 * [layers] + 3 * [0], "the second rank has no tokens at first"


def test_exchange_that_is_a_unit_on_only_one_rank_never_runs_again(tmp_path: Path) -> None:
    for case in ranks(tmp_path, "ExchangeUnit", "all, then half", layers=1):
        assert_right(case, layers=1)
        assert case["opaque"][-1] == 1


@pytest.mark.parametrize(("layer", "without"), [("Late", ()), ("LateAtTimes", (0, 3))])
def test_region_that_turns_opaque_before_it_repeats_keeps_saved_tensors(
    layer: str, without: tuple[int, ...], tmp_path: Path
) -> None:
    for case in ranks(tmp_path, layer, "ever others", layers=1):
        assert_right(case, layers=1, without=without)
        assert case["opaque"][-1] == 1


def test_region_that_turns_opaque_after_it_repeats_raises(tmp_path: Path) -> None:
    # an error, since other ranks would wait forever: memplug kept nothing of that forward
    with pytest.raises(RuntimeError, match="communicates, and a forward was opaque .* would leave the others waiting"):
        ranks(tmp_path, "Late", "half")


def test_writing_to_a_kept_tensor_before_backward_raises(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation: it is at version"):
        ranks(tmp_path, "Sigmoid", "half")
