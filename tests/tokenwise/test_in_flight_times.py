"""The recorded step shows how much memory swapped tensors may use, by phase, without raising the step's peak."""

from __future__ import annotations

import pytest
import torch

from memplug.profile.trace import Pass, Trace
from memplug.tokenwise import in_flight
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.plan.solver import InFlight
from tests.support.blocks import Stack, assert_same, gradients, tokenwise, twin
from tests.support.traces import Recording


def step_of(before: int, forward: int, loss: int, backward: int) -> Trace:
    """Return a step with these peaks in bytes; 100 bytes exist before it, and 10 more from its forward on."""
    recording = Recording()
    recording.step()
    recording.malloc(10)
    recording.phase(Pass.FORWARD, 0)
    _at_once(recording, before - 110)
    recording.layer("layers.0.experts")
    _at_once(recording, forward - 110)
    recording.layer(None)
    _at_once(recording, loss - 110)
    recording.phase(Pass.BACKWARD, 0)
    recording.layer("layers.0")
    _at_once(recording, backward - 110)
    return recording.trace(base_bytes=100)


def _at_once(recording: Recording, nbytes: int) -> None:
    recording.op("aten::mm")
    recording.free(recording.malloc(nbytes))


def regions(late: bool, name: str = "layers.0") -> list[Region]:
    region = Region(name, "Layer", 0.0)
    region.native.offloads_late = late
    return [region]


@pytest.mark.parametrize(
    "late, bytes_of, expected",
    [
        (True, (150, 200, 300, 1000), (InFlight(2, 800), InFlight(1, 700))),
        (True, (150, 200, 1000, 300), (InFlight(2, 800), InFlight(1, 0))),
        (True, (150, 1000, 200, 300), (InFlight(2, 0), InFlight(1, 800))),
        (True, (1000, 200, 300, 300), (InFlight(2, 0), InFlight(1, 700))),
        (False, (150, 200, 300, 1000), (InFlight(2),)),
    ],
)
def test_in_flight_room_is_the_distance_to_the_step_peak(late, bytes_of, expected) -> None:
    assert in_flight.times(step_of(*bytes_of), regions(late), 2) == expected


def test_layer_belongs_to_a_region_only_by_whole_parts_of_its_name() -> None:
    around, other = regions(True, "layers"), regions(True, "layers.00")
    assert in_flight.times(step_of(150, 200, 300, 1000), around, 2) == (InFlight(2, 800), InFlight(1, 700))
    assert in_flight.times(step_of(150, 200, 300, 1000), other, 2)[1] == InFlight(1, 0), (
        "backward counts for the program, not for the region"
    )


def test_step_that_begins_at_its_peak_has_zero_in_flight_room() -> None:
    recording = Recording()
    recording.step()
    recording.free(-1, 50)
    assert in_flight.times(recording.trace(base_bytes=100), regions(True), 2) == (InFlight(2), InFlight(1))


def test_trace_without_events_gives_zero_in_flight_room() -> None:
    recording = Recording()
    recording.step()
    assert in_flight.times(recording.trace(), regions(True), 3) == (InFlight(3),)


@pytest.mark.parametrize("most_bytes", [480_000, 700_000])
def test_regions_hold_at_most_the_allowed_bytes(most_bytes: int) -> None:
    """Regions hold one region's saved tensors at least; without a limit they hold as much as full recomputation."""
    freely, least, kept_to = (most_held(promised) for promised in (None, 0, most_bytes))
    assert least <= kept_to <= max(least, most_bytes) < freely


def most_held(promised_bytes: int | None) -> int:
    """Return the peak of the bytes that a stack's regions hold; under full recomputation, mostly their inputs."""
    torch.manual_seed(0)
    model = Stack(40)
    reference = twin(model)
    executor = tokenwise(model, 1.0)
    executor.flow.most_held_bytes = promised_bytes
    for _ in range(3):
        executor.flow.peak_held_bytes = 0
        x = torch.randn(16, 24, 16)
        for network in (model, reference):
            network(x).square().sum().backward()
        assert_same(gradients(model), gradients(reference))
        executor.flow.end_step([region.native for region in model.regions])
    return executor.flow.peak_held_bytes
