"""A recorder, one per process, leaves nothing behind: neither at its end, nor after errors or recordings cut short."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from memplug import native
from memplug.errors import RecorderError
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Fingerprint
from tests.support import rows
from tests.support.recording import (
    callbacks,
    cpu_allocator,
    nothing_left,
    operator_names,
    record,
    recorder,
    sequence,
    trainer,
    without_accumulation,
)

__all__ = ["nothing_left", "recorder"]
details = pytest.mark.parametrize("detail", Detail)


def assert_gone() -> None:
    """Assert that neither operators nor allocations reach the native core."""
    core = native.load()
    core.take_sequence()
    core.take_requests()
    before = core.tracked_bytes()
    kept = torch.ones(64).exp()
    assert core.take_sequence()[1] == 0
    assert core.tracked_bytes() == before and core.take_requests() == b""
    del kept


# -- one at a time -----------------------------------------------------------------------------------------------------


def test_second_recorder_is_refused_until_the_first_stops(nothing_left: None) -> None:
    first = Recorder("cpu")
    for _ in range(2):
        with pytest.raises(RecorderError, match="taken") as error:
            Recorder("cpu")
        assert "detach" in error.value.advice
    assert sequence(first, torch.ones(2).exp)[-1:] == ["aten::exp"]
    first.stop()
    second = Recorder("cpu")
    first.stop()
    first.watch(True)
    assert sequence(second, torch.ones(2).exp)[-1:] == ["aten::exp"], "the stopped recorder does not affect it"
    second.stop()


def test_stopped_recorder_leaves_nothing_behind(nothing_left: None) -> None:
    recorder = Recorder("cpu")
    assert callbacks()
    record(recorder, trainer())
    recorder.stop()
    assert_gone()
    recorder.stop()
    recorder.watch(False)
    recorder.watch(True)
    assert_gone()


@details
def test_stopping_while_recording_leaves_nothing_behind(detail: Detail, nothing_left: None) -> None:
    kept = torch.ones(8)
    for steps in (1, 3):
        recorder, step = Recorder("cpu"), trainer()
        allocator = cpu_allocator()
        recorder.begin(detail)
        assert cpu_allocator() != allocator
        for _ in range(steps):
            step()
            kept.add_(kept.exp())
        recorder.stop()
        assert not recorder.recording and cpu_allocator() == allocator
        assert_gone()
    again = Recorder("cpu")
    trace = record(again, kept.exp_, Detail.TENSORS)
    assert trace.tensors["nbytes"].tolist() == [32]  # none of the stopped recordings' tensors
    assert trace.uses["operator"].tolist() == [0, 0]
    again.stop()


@pytest.mark.parametrize("recording", [False, True])
def test_dropped_recorder_leaves_nothing_behind(recording: bool, nothing_left: None) -> None:
    recorder = Recorder("cpu")
    if recording:
        recorder.begin(Detail.TENSORS)
        torch.ones(2).exp()
    del recorder
    gc.collect()
    assert_gone()
    Recorder("cpu").stop()


def test_one_recorder_can_record_repeatedly(recorder: Recorder) -> None:
    step = trainer()
    traces = [record(recorder, step, detail) for detail in (Detail.REQUESTS, Detail.TENSORS) * 3]
    for trace in traces:
        assert trace.replays_exactly() is True
        assert operator_names(trace) == operator_names(traces[0])
        assert np.array_equal(trace.requests["nbytes"], traces[0].requests["nbytes"])
        assert np.array_equal(trace.uses, traces[1].uses) or not len(trace.uses)


def test_recording_tracks_its_peak_and_can_be_dropped(recorder: Recorder) -> None:
    recorder.begin(Detail.TENSORS)
    before, peaks = recorder.peak_bytes, []  # blocks of another test's arena may be in use
    for nbytes in (400, 4000, 800):
        torch.empty(nbytes, dtype=torch.uint8)
        peaks.append(recorder.peak_bytes - before)
    recorder.drop()
    assert peaks == [400, 4000, 4000] and not recorder.recording
    assert sequence(recorder, torch.ones(2).exp)[-1:] == ["aten::exp"], "watching continues"
    trace = record(recorder, lambda: torch.empty(500, dtype=torch.uint8), Detail.TENSORS)
    assert trace.requests["nbytes"].tolist() == trace.tensors["nbytes"].tolist() == [500]
    assert trace.peak_bytes - trace.base_bytes == 500 and trace.replays_exactly() is True


def test_recording_is_refused_if_another_allocator_is_already_in_front(recorder: Recorder) -> None:
    native.load().install_cpu()
    with pytest.raises(RecorderError, match="already put its allocator in front"):
        recorder.begin(Detail.REQUESTS)
    assert not recorder.recording and sequence(recorder, torch.ones(2).exp)[-1:] == ["aten::exp"]
    native.load().uninstall_cpu()
    assert record(recorder, lambda: torch.empty(1)).replays_exactly() is True


# -- errors ------------------------------------------------------------------------------------------------------------


@details
def test_failing_operator_is_recorded_and_changes_nothing_after_it(detail: Detail, recorder: Recorder) -> None:
    def fails() -> None:
        with contextlib.suppress(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)

    step = trainer()
    expected = operator_names(record(recorder, step, detail))
    failing = record(recorder, lambda: (fails(), step()), detail)
    names = operator_names(failing)
    assert names[-len(expected) :] == expected and "aten::mm" in names[: -len(expected)]
    assert failing.replays_exactly() is True
    again = record(recorder, step, detail)
    size = len(again.uses)
    assert operator_names(again) == expected
    assert np.array_equal(again.uses["operator"] + len(names) - len(expected), failing.uses["operator"][-size:])


@details
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_interrupted_step_leaves_the_next_recording_unchanged(
    where: str, error: type[BaseException], detail: Detail, recorder: Recorder
) -> None:
    def interrupt(*_: Any) -> None:
        raise error

    def interrupted() -> None:
        y = torch.ones(4, requires_grad=True).exp()
        with recorder.suspended if where == "forward" else contextlib.nullcontext():
            y.register_hook(interrupt) if where == "backward" else interrupt()
        y.sum().backward()

    step = trainer(optimizes=False)
    expected = record(recorder, step, detail)
    recorder.begin(detail)
    with pytest.raises(error):
        interrupted()
    assert recorder.end(Fingerprint(), ()).replays_exactly() is True
    after = record(recorder, step, detail)
    assert operator_names(after) == operator_names(expected)
    assert without_accumulation(operator_names(after)) == sequence(recorder, step)
    assert np.array_equal(after.uses, expected.uses)
    assert set(after.phases) == set(expected.phases)


def call_inside_operator(call: Callable[[], Any]) -> None:
    """Run `call` in the middle of a custom operator that is written in Python."""
    calls.append(call)
    torch.ops.memplug_tests.calls(torch.ones(16))


calls: list[Callable[[], Any]] = []


@torch.library.custom_op("memplug_tests::calls", mutates_args=())
def _calls(x: torch.Tensor) -> torch.Tensor:
    calls.pop()()
    return x.clone()


def test_operator_in_which_a_recording_ends_is_no_parent_in_the_next_one(recorder: Recorder) -> None:
    recorder.begin(Detail.TENSORS)
    call_inside_operator(lambda: recorder.end(Fingerprint(), ()))
    trace = record(recorder, torch.ones(2).exp, Detail.REQUESTS)
    assert trace.operators["depth"].tolist() == [0]


def test_recordings_may_begin_and_end_inside_an_operator(recorder: Recorder) -> None:
    kept = torch.ones(2)
    call_inside_operator(lambda: recorder.begin(Detail.TENSORS))
    kept.exp_()
    traces = []
    call_inside_operator(lambda: traces.append(recorder.end(Fingerprint(), ())))
    call_inside_operator(lambda: recorder.begin(Detail.TENSORS))
    call_inside_operator(lambda: traces.append(recorder.end(Fingerprint(), ())))
    call_inside_operator(lambda: (recorder.begin(Detail.TENSORS), recorder.end(Fingerprint(), ()), recorder.begin(1)))
    recorder.end(Fingerprint(), ())
    traces.append(record(recorder, kept.exp_, Detail.TENSORS))
    recorder.begin(Detail.TENSORS)
    call_inside_operator(lambda: (recorder.drop(), recorder.begin(Detail.TENSORS), kept.exp_()))
    kept.exp_()
    traces.append(recorder.end(Fingerprint(), ()))
    assert operator_names(traces[-1]).count("aten::exp_") == 2
    last = rows.operator(traces[-1], -1)
    assert (last.name, last.reads, last.writes) == ("aten::exp_", (0,), (0,))
    assert traces[-1].tensors["nbytes"].tolist() == [8, 64, 64], "the operator around it has no index in this recording"
    for trace in traces:
        assert trace.replays_exactly() in (True, None)
    assert traces[-2].tensors["nbytes"].tolist() == [8] and len(traces[-2].uses) == 2
