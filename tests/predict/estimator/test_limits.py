"""The search for the largest count that fits, with steps whose memory for each count is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.config import load_config
from memplug.device.capacity import DEVICE_SHARE
from memplug.predict.estimator import MODES, limits
from memplug.predict.estimator.limits import MOST_GROWTH, MOST_STEPS, LimitSearch, capacity_bytes, largest, precise
from memplug.predict.estimator.request import EstimateRequest
from memplug.predict.estimator.shapes import Shape
from memplug.predict.estimator.workload import Workload
from memplug.predict.virtual import GpuProfile

BYTES = st.integers(1, 10**9)
BEGIN = st.integers(1, 64)
WORKLOAD = Workload(shape=Shape({}), layers=32, seq_len=4096)


def searched(bytes_of: Callable[[int], float], begin: int, limit_bytes: float, step: int = 0) -> tuple[int, list[int]]:
    """Return the count that the search finds, and the counts that it tries."""
    tried: list[int] = []

    def noted(count: int) -> float:
        tried.append(count)
        return bytes_of(count)

    return largest(noted, begin, step or begin, limit_bytes), tried


@given(fixed=BYTES, of_count=BYTES, begin=BEGIN, limit=st.integers(1, 10**12))
def test_limit_search_finds_the_largest_count_if_memory_is_linear(fixed, of_count, begin, limit):
    found, tried = searched(lambda count: fixed + count * of_count, begin, limit)
    assert fixed + found * of_count <= limit or found == 0
    assert fixed + (found + precise(found)) * of_count > limit or len(tried) == MOST_STEPS
    distance = max(found, begin) / max(1, min(found, begin))
    assert len(tried) <= 5 + math.log(distance, MOST_GROWTH)
    assert len(tried) == len(set(tried))


@given(bend=st.integers(1, 2000), steeper=st.floats(0.2, 8), begin=BEGIN, limit=st.integers(2, 10**4))
def test_limit_search_converges_when_memory_slope_has_a_kink(bend, steeper, begin, limit):
    def bytes_of(count: int) -> float:
        return count + max(0, count - bend) * (steeper - 1)

    found, tried = searched(bytes_of, begin, limit)
    assert bytes_of(found) <= limit < bytes_of(found + precise(found))
    assert len(tried) < MOST_STEPS


@given(flat=st.integers(1, 10**6), begin=BEGIN)
def test_limit_search_tries_no_huge_sizes_while_memory_is_flat(flat, begin):
    limit = 2 * flat
    found, tried = searched(lambda count: max(flat, count), begin, limit)
    assert found <= limit < found + precise(found) or len(tried) == MOST_STEPS
    assert max(tried) <= MOST_GROWTH * max(begin, limit)


@given(count=st.integers(1, 1000))
def test_limit_search_that_begins_at_the_answer_runs_two_steps(count):
    assert searched(lambda each: 100.0 * each, count, 100.0 * count, precise(count)) == (
        count,
        [count, count + precise(count)],
    )


def test_limit_search_returns_zero_if_nothing_fits():
    found, tried = searched(lambda count: 1e12 + count, 16, 1e9)
    assert found == 0 and tried[-1] == 1


def test_capacity_is_the_device_budget_up_to_the_gpus_memory() -> None:
    gpu = GpuProfile.named("h100")
    asked = {gib: load_config({"enabled": True, "device_budget_gib": gib}) for gib in ("auto", 40, 4000)}
    assert capacity_bytes(gpu, asked["auto"], "memplug") == DEVICE_SHARE * gpu.memory_bytes
    assert capacity_bytes(gpu, asked[40], "memplug") == 40 * 2**30
    assert capacity_bytes(gpu, asked[4000], "memplug") == capacity_bytes(gpu, asked[40], "full") == gpu.memory_bytes


def limits_of(mode: str, told: list[str], ran: list[Workload], monkeypatch: pytest.MonkeyPatch) -> LimitSearch:
    """Return a search that adds each step to `ran`; a step takes one MiB for each token of its batch."""

    def least_bytes(workload: Workload, *args: object) -> float:
        ran.append(workload)
        return 2.0**20 * workload.seq_len * workload.micro_batch

    monkeypatch.setattr(limits, "least_bytes", least_bytes)
    gpu = dataclasses.replace(GpuProfile.named("h200"), memory_bytes=100 * 2**30)
    return LimitSearch(WORKLOAD, EstimateRequest.of(None, gpu, MODES), mode, told.append)


def test_limit_search_progress_shows_the_step_number_and_its_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    limits_of("keep", told, [], monkeypatch).longest()
    assert told[0] == "limits of keep, step 1 of at most 16: a sequence of 4,096 tokens"
    assert f"step {len(told)} of at most 16" in told[-1]


def test_length_and_batch_searches_run_few_steps_and_repeat_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Workload] = []
    search = limits_of("keep", [], ran, monkeypatch)
    assert search.longest() == pytest.approx(100 * 1024, rel=1 / 32) and search.largest_batch() == 25
    assert len(ran) <= 8 and len({(each.seq_len, each.micro_batch) for each in ran}) == len(ran)
    assert {each.layers for each in ran} == {WORKLOAD.layers}


def test_batch_search_works_without_an_earlier_length_search(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_of("full", [], [], monkeypatch).largest_batch() == 25
