"""The search for the largest count that fits, on memory that is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.config import load_config
from memplug.device.capacity import DEVICE_SHARE
from memplug.device.virtual import Hardware
from memplug.estimator import limits
from memplug.estimator.limits import FEW_LAYERS, MOST_CHECKS, PRECISION, capacity_bytes, largest
from memplug.estimator.shapes import Shape
from memplug.estimator.workload import Workload

BYTES = st.integers(1, 10**9)


@given(
    fixed=BYTES, of_layer=BYTES, of_count=BYTES, of_both=BYTES, begin=st.integers(1, 64), limit=st.integers(1, 10**12)
)
def test_where_memory_rises_evenly_the_largest_is_found(fixed, of_layer, of_count, of_both, begin, limit):
    def bytes_of(count: int, layers: int) -> float:
        return fixed + of_layer * layers + count * (of_count + of_both * layers)

    found = largest(bytes_of, begin, 32, limit)
    assert bytes_of(found, 32) <= limit or found == 0
    assert bytes_of(found + 1 + found // PRECISION, 32) > limit


@given(bend=st.integers(1, 2000), steeper=st.floats(1, 1.3), limit=st.integers(2, 10**4))
def test_where_it_rises_a_little_faster_from_somewhere_on_few_steps_with_all_layers_are_enough(bend, steeper, limit):
    runs = []

    def bytes_of(count: int, layers: int) -> float:
        runs.append(layers)
        return layers * (count + max(0, count - bend) * (steeper - 1))

    found = largest(bytes_of, 16, 32, 32 * limit)
    assert bytes_of(found, 32) <= 32 * limit
    assert bytes_of(found + 2 + found // 16, 32) > 32 * limit
    assert runs.count(32) <= MOST_CHECKS + 2 and runs.count(FEW_LAYERS[0]) == 2, "with all layers a step takes long"


def test_where_nothing_fits_that_is_none():
    assert largest(lambda count, layers: 1e12 * layers + count, 16, 32, 1e9) == 0


def test_what_a_step_may_take_is_memplugs_budget_and_never_more_than_the_gpu_has() -> None:
    gpu = Hardware.named("h100")
    asked = {gib: load_config({"enabled": True, "device_budget_gib": gib}) for gib in ("auto", 40, 4000)}
    assert capacity_bytes(gpu, asked["auto"], "memplug") == DEVICE_SHARE * gpu.memory_bytes
    assert capacity_bytes(gpu, asked[40], "memplug") == 40 * 2**30
    assert capacity_bytes(gpu, asked[4000], "memplug") == capacity_bytes(gpu, asked[40], "full") == gpu.memory_bytes


def test_each_step_of_a_search_is_told_with_how_many_there_are_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "least_bytes", lambda workload, *args: workload.layers * workload.seq_len * 2.0**20)
    workload, told = Workload(shape=Shape({}), layers=32, seq_len=4096), []
    limits.longest(workload, load_config({"enabled": True}), Hardware.named("h200"), "memplug", say=told.append)
    assert told[0] == "limits of memplug, step 1 of at most 8: a sequence of 4,096 tokens, 2 layers"
    assert 5 <= len(told) <= 8 and f"step {len(told)} of at most 8" in told[-1] and "32 layers" in told[-1]
    assert limits.largest_batch(workload, load_config({"enabled": True}), Hardware.named("h200"), "keep") >= 1
