"""A step of all stages of a pipeline, composed of the stages' own estimates."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.errors import BudgetError
from memplug.predict.estimator.layout import RankLayout
from memplug.predict.estimator.result import Estimate, ModeEstimate
from memplug.predict.estimator.stages import of_all
from memplug.predict.virtual import GpuProfile

OPTIMIZER_S = 1.0


def _stage(step_s: float, nbytes: int, **fields: Any) -> ModeEstimate:
    numbers = dict.fromkeys(("host_bytes", "to_host_bytes", "to_device_bytes"), 0)
    return ModeEstimate(
        mode="keep",
        step_s=step_s,
        schedule_s=step_s - OPTIMIZER_S,
        flops=fields.pop("flops", 1e12),
        peak_allocated_bytes=nbytes,
        peak_reserved_bytes=nbytes + 1,
        arena_reserved_bytes=fields.pop("arena_bytes", None),
        bound="compute",
        fits=nbytes < 100,
        **numbers,
    )


def _pipeline(
    stages: dict[int, ModeEstimate], pipeline: int, micro_batches: int, impossible: dict[int, float] | None = None
) -> Estimate:
    errors = {stage: {"memplug": BudgetError(gib, stage, 1.0)} for stage, gib in (impossible or {}).items()}
    each_stage = {
        stage: Estimate(GpuProfile.named("h200"), {"keep": each}, errors.get(stage, {}))
        for stage, each in stages.items()
    }
    return of_all(each_stage, RankLayout(pipeline=pipeline), micro_batches)


@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_bubble_share_of_equal_stages_is_stages_minus_1_over_micro_batches(micro_batches: int) -> None:
    found = _pipeline({0: _stage(9.0, 1), 1: _stage(9.0, 1), 3: _stage(9.0, 1)}, 4, micro_batches)["keep"]
    assert found.bubble_s == pytest.approx(8.0 * 3 / micro_batches)  # 1 s of the 9 is the optimizer's
    assert found.step_s == pytest.approx(OPTIMIZER_S + 8.0 * (micro_batches + 3) / micro_batches)


def test_slowest_stage_sets_step_time_and_largest_stage_sets_memory() -> None:
    first = dataclasses.replace(_stage(5.0, 120), to_host_bytes=7)
    found = _pipeline({0: first, 1: _stage(5.0, 80), 3: _stage(9.0, 60, flops=5e12, arena_bytes=70)}, 4, 8)
    keep = found["keep"]
    assert keep.step_s == pytest.approx(9.0 + 3 * 4.0 / 8)
    assert (keep.peak_allocated_bytes, keep.peak_reserved_bytes, keep.arena_reserved_bytes) == (120, 121, 121)
    assert keep.to_host_bytes == 7 and not keep.fits and keep.flops == 2e12
    assert {stage: each["keep"].peak_allocated_bytes for stage, each in found.stages.items()} == {0: 120, 1: 80, 3: 60}


def test_mode_that_cannot_fit_reports_the_budget_of_the_largest_stage() -> None:
    stages = {stage: _stage(5.0, 1) for stage in (0, 1)}
    found = _pipeline(stages, 2, 4, {0: 3.0, 1: 2.0})
    assert found.impossible["memplug"].least_gib == 3.0 and list(found) == ["keep"]


def _simulated_s(forward_s: list[float], micro_batches: int) -> float:
    """Return the seconds of a simulated 1F1B schedule, in which a backward takes twice as long as its forward.

    Each stage runs its passes in order; a pass begins once its input exists.
    """
    stages = len(forward_s)
    todo = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micro_batches)
        alternating = [
            (kind, number + ahead * (kind == "f")) for number in range(micro_batches - ahead) for kind in "fb"
        ]
        behind = range(micro_batches - ahead, micro_batches)
        todo.append([("f", number) for number in range(ahead)] + alternating + [("b", number) for number in behind])
    ends: dict[tuple[str, int, int], float] = {}
    free_s = [0.0] * stages
    while any(todo):
        for stage in range(stages):
            while todo[stage]:
                kind, number = todo[stage][0]
                other = stage - 1 if kind == "f" else stage + 1
                if 0 <= other < stages and (kind, number, other) not in ends:
                    break
                begin_s = max(free_s[stage], ends.get((kind, number, other), 0.0))
                free_s[stage] = begin_s + forward_s[stage] * (1 if kind == "f" else 2)
                ends[kind, number, stage] = free_s[stage]
                todo[stage].pop(0)
    return max(free_s)


@given(first=st.floats(1.0, 1.2), last=st.floats(1.0, 2.0), pipeline=st.integers(2, 8), rounds=st.integers(1, 4))
def test_pipeline_step_matches_a_simulated_schedule(first: float, last: float, pipeline: int, rounds: int) -> None:
    micro_batches = rounds * pipeline
    forward_s = [first, *[1.0] * (pipeline - 2), last]
    stages = {
        stage: _stage(OPTIMIZER_S + 3 * micro_batches * forward_s[stage], 1)
        for stage in RankLayout(pipeline=pipeline).stages
    }
    found = _pipeline(stages, pipeline, micro_batches)["keep"]
    simulated_s = OPTIMIZER_S + _simulated_s(forward_s, micro_batches)
    if last >= first:
        assert found.step_s == pytest.approx(simulated_s)
    else:
        even_s = OPTIMIZER_S + 3 * max(forward_s) * (micro_batches + pipeline - 1)
        assert simulated_s <= found.step_s * (1 + 1e-9) <= even_s * (1 + 2e-9)
