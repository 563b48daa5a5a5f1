"""Programs by others train the same with memplug as without, bit for bit, while they swap and use the arena."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.conftest import Results
from tests.clients.parts import Case
from tests.clients.worker import known_cases

pytestmark = pytest.mark.distributed

CASES = known_cases()
REFUSED = "SFT, refused"
BROKEN_OFF = "Lightning, broken off"
WITHOUT_REGIONS = "Lightning, arena alone"


# the clients that differ most, at the ZeRO stage that is hardest for memplug; long tests run the other cases
SOME = {"Trainer, ZeRO 3", "LoRA, ZeRO 3", "Accelerate, ZeRO 2", "Lightning", "FSDP2", REFUSED, BROKEN_OFF}
assert set(CASES) >= SOME


def chosen(wanted: Callable[[str, Case], bool]) -> list[Any]:
    """Return the cases for a test, which are skipped if a package is missing."""
    return [pytest.param(name, marks=_marks(name, case)) for name, case in CASES.items() if wanted(name, case)]


def _marks(name: str, case: Case) -> list[pytest.MarkDecorator]:
    missing = [package for package in case.needs if importlib.util.find_spec(package) is None]
    skipped = [pytest.mark.skip(reason=f"{', '.join(missing)} not installed")] if missing else []
    return skipped if name in SOME else [*skipped, pytest.mark.long]


@pytest.mark.parametrize("case", chosen(lambda name, case: name != REFUSED))
def test_losses_and_weights_equal_those_without_memplug(case: str, results: Results) -> None:
    for ours, theirs in zip(results(case, "with"), results(case, "without"), strict=True):
        assert len(set(ours["losses"])) > 2, "the model learns"
        assert ours["losses"] == theirs["losses"]
        assert ours.get("evaluations") == theirs.get("evaluations")
        assert ours["digest"] == theirs["digest"]
        assert not theirs["reports"], "nothing was attached"


@pytest.mark.parametrize("case", chosen(lambda name, case: name not in (REFUSED, BROKEN_OFF)))
def test_every_step_is_counted_tensors_are_swapped_and_the_arena_serves(case: str, results: Results) -> None:
    several = case.startswith("two ")
    for rank in results(case, "with"):
        assert len(rank["reports"]) == 1 + several, "models that do not train are left alone"
        for report in rank["reports"]:
            assert report["steps"] == rank["steps"]
            assert (report["offloaded_bytes"] > 0) == (case != WITHOUT_REGIONS)
            assert report["recomputed_in_full"] == 0
        served = [report.get("arena_served", 0) > 0 for report in rank["reports"]]
        assert served[0], rank["reports"][0]
        # there is one arena per process; the other model's report says which model has it
        assert all(one or report["arena_off_because"] for one, report in zip(served, rank["reports"], strict=True))


@pytest.mark.parametrize("case", chosen(lambda name, case: case.planned is not None))
def test_training_reaches_a_plan(case: str, results: Results) -> None:
    for ours, theirs in zip(results(case, "planned"), results(case, "without"), strict=True):
        (report,) = ours["reports"]
        assert "stable" in report["history"], ours["told"]
        assert report["steps"] == ours["steps"]
        assert report["predicted_peak_bytes"] > 0
        # a plan may split the rows of a matmul, which rounds differently
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)


@pytest.mark.parametrize("case", chosen(lambda name, case: name == REFUSED))
def test_block_refuses_gradient_checkpointing_of_trl_with_advice(case: str, results: Results) -> None:
    (refused,) = results(case, "with")
    assert "gradient checkpointing" in refused["refused"] and "is on" in refused["refused"]
    assert "gradient_checkpointing=False" in refused["refused"] and "TRL" in refused["refused"]
    assert not refused["losses"], "before the first step"


@pytest.mark.parametrize("case", chosen(lambda name, case: name == BROKEN_OFF))
def test_error_in_a_lightning_training_detaches_the_session(case: str, results: Results) -> None:
    (broken,) = results(case, "with")
    (report,) = broken["reports"]
    assert broken["stage"] == "detached"
    assert report["steps"] == 3
    assert report["forwards_in_flight"] == 0
