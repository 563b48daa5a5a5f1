"""The search, compared with trying every configuration."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplug.predict.tune.search import (
    DEVICE,
    HOST,
    SLOWER,
    Box,
    Configuration,
    MemoryLimits,
    Prediction,
    StepLayout,
    least_memory,
    search,
)


@dataclass(frozen=True)
class Table:
    """An estimator in which each chunk or block on the device adds bytes, which may be 0.

    The optimizer's time is that of the slower one of device and host, so it is least in the middle.
    """

    blocks: int
    persist: tuple[int, int, int]  # bytes; optimizer's seconds for a chunk on the device; on the host
    buffer: tuple[int, int]  # bytes; seconds if it is not buffered
    swap: tuple[int, int, int]  # bytes on the device; bytes on the host; seconds
    checkpoint: tuple[int, int]  # bytes; seconds

    def predict(self, at: Configuration) -> Prediction:
        return self._at(at.layout, (at.n_persist,) * 2, at.n_buffer, at.n_buffer, (at.n_swap,) * 2, at.n_checkpoint, 0)

    def least(self, box: Box) -> Prediction:
        persist, swap = (box.n_persist[0], box.n_persist[-1]), (box.n_swap[0], box.n_swap[-1])
        more = box.n_checkpoint[-1] - box.n_checkpoint[0]
        return self._at(box.layout, persist, box.n_buffer[0], box.n_buffer[-1], swap, box.n_checkpoint[0], more)

    def _at(self, layout, persist, buffer_low, buffer_high, swap, checkpoint, more) -> Prediction:
        recomputed = min(checkpoint + more, self.blocks - swap[1])
        kept = self.blocks - swap[1] - recomputed
        device = self.persist[0] * persist[0] + self.buffer[0] * buffer_low
        device += (self.swap[0] + self.checkpoint[0]) * kept + self.checkpoint[0] * recomputed
        update = max(self.persist[1] * persist[0], self.persist[2] * (4 - persist[1]))
        seconds = 10 - 2 * layout.stage + update + self.buffer[1] * (3 - buffer_high) + self.swap[2] * swap[0]
        return Prediction(
            step_s=float(seconds + self.checkpoint[1] * checkpoint),
            tokens=layout.micro_batch * 16,
            device_bytes=device * layout.micro_batch,
            host_bytes=self.swap[1] * swap[0] + 4 * (4 - persist[1]),
        )


few = st.integers(0, 3)
estimators = st.builds(
    Table, st.just(4), st.tuples(few, few, few), st.tuples(few, few), st.tuples(few, few, few), st.tuples(few, few)
)
layouts = st.lists(
    st.builds(
        StepLayout,
        stage=st.integers(1, 3),
        offload=st.just("none"),
        micro_batch=st.integers(1, 2),
        accumulation=st.just(1),
    ),
    min_size=1,
    max_size=2,
    unique=True,
)


@st.composite
def spaces(draw: st.DrawFn) -> list[Box]:
    """Draw one or two boxes, whose ranges need not begin at 0."""

    def part(most: int) -> range:
        first = draw(st.integers(0, most))
        return range(first, draw(st.integers(first, most)) + 1)

    return [
        Box(layout=each, blocks=4, n_persist=part(4), n_buffer=part(3), n_swap=part(4), n_checkpoint=part(4))
        for each in draw(layouts)
    ]


def brute_force(
    boxes: list[Box], table: Table, limits: MemoryLimits, count: int
) -> list[tuple[Configuration, Prediction]]:
    """Return the best configurations by trying all, without code of the search except its types."""
    every = [(at, table.predict(at)) for box in boxes for at in box]
    fitting = [
        (at, made)
        for at, made in every
        if made.device_bytes <= limits.device_bytes and made.host_bytes <= limits.host_bytes
    ]
    rank = sorted(
        fitting, key=lambda each: (each[1].step_s / each[1].tokens, each[1].device_bytes, each[1].host_bytes, each[0])
    )
    return rank[:count]


@settings(max_examples=1000, deadline=None)
@given(spaces(), estimators, st.integers(0, 40), st.integers(0, 25), st.integers(1, 12))
def test_search_matches_brute_force_with_and_without_bounds(
    boxes: list[Box], table: Table, device: int, host: int, count: int
) -> None:
    limits = MemoryLimits(device, host)
    expected = brute_force(boxes, table, limits, count)
    for exhaustive in (0, 10_000):
        found = search(boxes, table, limits, count, exhaustive=exhaustive)
        assert list(found.best) == expected
        assert len(found.best) + found.fits + sum(found.ruled_out.values()) == sum(map(len, boxes))


@settings(max_examples=200, deadline=None)
@given(spaces(), estimators, st.integers(0, 25))
def test_least_memory_matches_brute_force(boxes: list[Box], table: Table, host: int) -> None:
    every = [table.predict(at) for box in boxes for at in box]
    if not every:
        return
    on_host = [made.device_bytes for made in every if made.host_bytes <= host]
    for exhaustive in (0, 10_000):
        _, least = least_memory(boxes, table, MemoryLimits(0, host), exhaustive=exhaustive)
        if on_host:
            assert least.device_bytes == min(on_host) and least.host_bytes <= host
        else:
            assert least.host_bytes == min(made.host_bytes for made in every)


@given(spaces(), estimators)
def test_stand_in_estimators_bound_never_exceeds_a_configuration(boxes: list[Box], table: Table) -> None:
    """Check `Table.least`, since the search relies on it."""
    for box in boxes:
        least = table.least(box)
        for at in box:
            made = table.predict(at)
            assert least.step_s <= made.step_s and least.host_bytes <= made.host_bytes
            assert least.device_bytes <= made.device_bytes


def test_box_yields_each_valid_configuration_once_and_halves_partition_it() -> None:
    layout = StepLayout(stage=3, offload="none", micro_batch=1, accumulation=1)
    box = Box(layout=layout, blocks=5, n_persist=range(2), n_buffer=range(1, 4), n_swap=range(4), n_checkpoint=range(6))
    every = list(box)
    assert len(every) == len(box) == len(set(every)) == 2 * 3 * (6 + 5 + 4 + 3)
    assert all(at.n_swap + at.n_checkpoint <= 5 for at in every)
    one, other = box.halves()
    assert sorted([*one, *other]) == sorted(every) and len(one) + len(other) == len(box)


def test_search_counts_ruled_out_configurations_and_prunes_large_spaces() -> None:
    layout = StepLayout(stage=3, offload="none", micro_batch=1, accumulation=1)
    table = Table(4, (1, 0, 0), (1, 1), (1, 1, 0), (1, 1))
    box = Box(layout=layout, blocks=4, n_persist=range(5), n_buffer=range(4), n_swap=range(5), n_checkpoint=range(5))
    limits = MemoryLimits(6, 18)
    tried = search([box], table, limits, 3)
    assert set(tried.ruled_out) == {DEVICE, HOST} and tried.predicted == len(box)
    bounded = search([box], table, limits, 3, exhaustive=0)
    assert bounded.best == tried.best and bounded.predicted < len(box) / 2
    assert set(bounded.ruled_out) <= {DEVICE, HOST, SLOWER}


def test_search_ranks_by_seconds_per_token() -> None:
    small, large = (StepLayout(stage=3, offload="none", micro_batch=n, accumulation=1) for n in (1, 2))
    table = Table(4, (0, 0, 0), (0, 0), (0, 0, 0), (0, 0))
    ranges = {"n_persist": range(1), "n_buffer": range(1), "n_swap": range(1), "n_checkpoint": range(1)}
    boxes = [Box(layout=each, blocks=4, **ranges) for each in (small, large)]
    (first, made), _ = search(boxes, table, MemoryLimits(100, 100), 2).best
    assert first.layout == large and made.tokens_per_s == pytest.approx(32 / made.step_s)
