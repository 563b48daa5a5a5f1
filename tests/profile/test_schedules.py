"""Synthetic steps follow their schedule, and consist of recorded layers."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from memplug.profile.trace import EventKind, Pass
from tests.support.schedules import SCHEDULES, Schedule, order, record, scripts

SMALL = Schedule(source="llama7b_ckpt", layers=4, micro_batches=8, chunks=2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_named_schedule_has_its_stated_number_of_requests(name):
    assert len(record(SCHEDULES[name]).requests) == SCHEDULES[name].requests


def test_seed_changes_only_sizes_in_dynamic_layers():
    schedule = Schedule(source="mixtral_ckpt", layers=2, micro_batches=4, dynamic=True)
    first, again, other = (record(schedule, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.events, again.events)
    differs = first.requests["nbytes"] != other.requests["nbytes"]
    assert differs.any() and first.requests["dynamic"][differs].all()


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("stage", range(4))
def test_each_chunk_of_each_micro_batch_runs_forward_then_backward_once(chunks, stage):
    schedule = dataclasses.replace(SMALL, chunks=chunks, stage=stage)
    ran = list(order(schedule))
    assert Counter(ran) == Counter(
        (kind, micro_batch, chunk)
        for kind in (Pass.FORWARD, Pass.BACKWARD)
        for micro_batch in range(8)
        for chunk in range(chunks)
    )
    for micro_batch in range(8):
        forwards = [ran.index((Pass.FORWARD, micro_batch, chunk)) for chunk in range(chunks)]
        backwards = [ran.index((Pass.BACKWARD, micro_batch, chunk)) for chunk in reversed(range(chunks))]
        assert forwards + backwards == sorted(forwards + backwards)


def test_peak_of_micro_batches_in_flight_equals_the_remaining_stages():
    for stage in range(4):
        in_flight = np.cumsum(
            [
                1 if kind == Pass.FORWARD else -1
                for kind, *_ in order(Schedule(source="llama7b_ckpt", layers=1, micro_batches=8, stage=stage))
            ]
        )
        assert in_flight.max() == 4 - stage and in_flight[-1] == 0


@pytest.mark.parametrize("source", ["llama7b_ckpt", "mixtral_ckpt"])
def test_layer_scripts_free_all_requests_in_forward_or_backward(source):
    forward, saving, backward = (scripts(source)[name] for name in ("forward", "saving", "backward"))
    asked = {("forward", act.slot): act.nbytes for act in forward if act.nbytes}
    freed = {("forward", act.slot) for act in (*forward, *backward) if act.script == "forward" and not act.nbytes}
    assert freed == set(asked), "the backward frees all that its forward leaves"
    saved = {act.slot for act in saving if act.nbytes} - {act.slot for act in saving if not act.nbytes}
    taken = {act.slot for act in backward if act.script == "saving" and not act.nbytes}
    assert saved == taken and len(saved) > 10


def test_recomputation_saves_less_than_a_tenth_of_the_bytes():
    def saved_bytes(recompute: bool) -> int:
        step = record(dataclasses.replace(SMALL, recompute=recompute))
        first_backward = int(
            np.flatnonzero(
                np.isin(step.events["phase"], [i for i, phase in enumerate(step.phases) if phase.kind == Pass.BACKWARD])
            )[0]
        )
        return int(step.live_bytes[first_backward - 1])

    assert saved_bytes(True) < saved_bytes(False) / 10


def test_step_ends_without_live_bytes():
    step = record(dataclasses.replace(SMALL, requests=10_000))
    assert step.live_bytes[-1] == 0 and len(step.requests) == 10_000
    assert (step.requests["free_event"] > step.requests["malloc_event"]).all()


def test_only_expert_requests_are_dynamic():
    step = record(Schedule(source="mixtral_ckpt", layers=2, micro_batches=4, dynamic=True))
    dynamic = step.requests["dynamic"]
    names = {step.layers[layer].name for layer in step.requests["malloc_layer"][dynamic]}
    assert names == {"layers.0.experts", "layers.1.experts"}
    assert step.requests["nbytes"][~dynamic].max() < step.requests["nbytes"][dynamic].max()
    still = record(Schedule(source="mixtral_ckpt", layers=2, micro_batches=4))
    assert not still.requests["dynamic"].any()
    assert (still.events["kind"] == EventKind.MALLOC).sum() == (step.events["kind"] == EventKind.MALLOC).sum()
