"""Recordings of a session's steps, on request or as the block says; afterwards nothing is left behind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import optimizer as optimizers

import memplug
from memplug.errors import NativeError, RecorderError, TraceError
from memplug.profile.recorder import Recorder
from memplug.profile.trace import Pass, Trace
from memplug.profile.trace_file import load
from memplug.session.boundary import WATCHED_STEPS
from memplug.session.recording import Recording
from memplug.session.table import Stage
from memplug.tokenwise.engine import executor as executing
from memplug.tokenwise.engine import region as settings
from memplug.tokenwise.engine.core import core
from tests.support.blocks import LAYERS, Stack
from tests.support.hosts import block, ds_config, make_engine, tokens

QUICK = {"profiler": {"warmup_steps": 0, "policy_steps": 2}}


def train(model: torch.nn.Module, session: memplug.Session, steps: int = 1, length: int = 6) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        for _ in range(2):
            model(torch.randn(2, length, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step()


def assert_nothing_left(model: torch.nn.Module) -> None:
    """Assert that there is no hook on the model or the optimizers, and that this process's recorder is free."""
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not optimizers._global_optimizer_pre_hooks and not optimizers._global_optimizer_post_hooks
    recorder = Recorder("cpu")
    recorder.take()
    torch.ones(3) + 1
    assert len(recorder.take()) > 0
    recorder.stop()


@pytest.mark.parametrize("alpha", [0, 0.5, "auto"])
def test_recorded_step_accounts_for_every_byte_by_phase_and_layer(alpha: Any, tmp_path: Path) -> None:
    model = Stack(3)
    with memplug.attach(model, {**block(alpha=alpha, regions=LAYERS), **QUICK}) as session:
        train(model, session, 8)
        assert session.stage is Stage.STABLE
        session.record(tmp_path / "trace.npz")
        train(model, session, 2)
    trace = load(tmp_path / "trace.npz")
    assert trace.replays_exactly() is True and len(trace.steps) == 1
    assert {(p.kind, p.micro_batch) for p in trace.phases} >= {
        (Pass.FORWARD, 0),
        (Pass.BACKWARD, 0),
        (Pass.FORWARD, 1),
        (Pass.BACKWARD, 1),
        (Pass.OPTIMIZER, -1),
    }
    assert [layer.name for layer in trace.layers] == [f"layers.{i}" for i in range(3)]
    backward = [i for i, phase in enumerate(trace.phases) if phase.kind is Pass.BACKWARD]
    requested = trace.requests[np.isin(trace.requests["malloc_phase"], backward)]
    assert set(requested["malloc_layer"]) == {-1, 0, 1, 2}, "-1: outside of layers"
    assert trace.fingerprint.model == "Stack" and trace.fingerprint.inputs == ("float32[2, 6, 16]",) * 2
    assert_nothing_left(model)


def test_session_trace_is_that_of_the_step_observed_for_planning() -> None:
    model = Stack(2)
    with memplug.attach(model, {**block(regions=LAYERS), **QUICK}) as session:
        assert session.trace is None
        train(model, session, 2)
        trace = session.trace
        assert isinstance(trace, Trace) and len(trace.uses) > 0
        train(model, session, 6)
        assert session.stage is Stage.STABLE and session.trace is trace
        assert session.report().tokenwise.predicted_peak_bytes > 0


def test_recording_steps_does_not_change_the_program(tmp_path: Path) -> None:
    # hooks and callbacks of a recording do not belong to the program
    model = Stack(2)
    with memplug.attach(model, {**block(regions=LAYERS), **QUICK}) as session:
        for _ in range(3 * WATCHED_STEPS):
            session.record()
            train(model, session)
        assert session.report().programs == 1 and session.stage is Stage.STABLE


def test_operators_are_watched_every_step_until_stable_then_every_eighth() -> None:
    model = Stack(2)
    with memplug.attach(model, {**block(regions=LAYERS), **QUICK, "arena": {"enabled": False}}) as session:
        session._attached.begin_forward()
        watched = []
        recorder = session._attached.boundary.recording.recorder
        take = recorder.take
        recorder.take = lambda: watched.append(take()) or watched[-1]
        train(model, session, 5 * WATCHED_STEPS)
        of_steps = watched[::2]  # every other call drops operators from before the step's first forward
        stable = next(i for i, _ in enumerate(session.history) if session.history[i][1] is Stage.STABLE)
        first = session.history[stable][0]
        seen = [step for step, operators in enumerate(of_steps, 1) if operators is not None]
        assert seen[:first] == list(range(1, first + 1))
        assert seen[first:] == list(range(first + WATCHED_STEPS, 5 * WATCHED_STEPS + 1, WATCHED_STEPS))


def test_unwatched_step_still_detects_that_layers_were_frozen() -> None:
    # frozen layers run the same forward; only the number of autograd nodes changes
    model = Stack(3)
    with memplug.attach(model, {**block(regions=LAYERS), **QUICK}) as session:
        train(model, session, 6)
        assert session.stage is Stage.STABLE
        for parameter in model.layers[0].parameters():
            parameter.requires_grad_(False)
        train(model, session, 2)
        assert session.stage is not Stage.STABLE


def test_timeline_is_written_after_each_plan(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    model = Stack(2)
    with memplug.attach(model, {**block(regions=LAYERS), **QUICK, "report": {"timeline": str(folder)}}) as session:
        train(model, session, 8)
        train(model, session, 10, length=12)
        assert session.report().replans == 2
        found = [load(file) for file in sorted(folder.iterdir())]
    assert [trace.fingerprint.inputs[0] for trace in found] == ["float32[2, 6, 16]", "float32[2, 12, 16]"]


def test_timeline_without_planning_shows_the_third_step(tmp_path: Path) -> None:
    model, folder = Stack(2), tmp_path / "traces"
    with memplug.attach(model, {**block(alpha=0.5, regions=LAYERS), "report": {"timeline": str(folder)}}) as session:
        train(model, session, 5)
    assert [file.name for file in folder.iterdir()] == ["step000003.npz"]


def test_timeline_of_a_second_run_overwrites_no_file_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traces"
    config = {**block(alpha=0.5, regions=LAYERS), "report": {"timeline": str(folder)}}
    for length in (6, 8, 10):
        model = Stack(2)
        with memplug.attach(model, config) as session:
            train(model, session, 5, length)
    found = {file.name: load(file).fingerprint.inputs[0] for file in folder.iterdir()}
    named = {f"step000003{run}.npz": f"float32[2, {length}, 16]" for run, length in (("", 6), ("-2", 8), ("-3", 10))}
    assert found == named


def test_replacing_an_earlier_trace_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(2)
    with caplog.at_level(logging.INFO, "memplug"):
        with memplug.attach(model, block(alpha=0.5, regions=LAYERS)) as session:
            for _ in range(2):
                session.record(tmp_path / "trace.npz")
                train(model, session, 2)
    told = [line for line in caplog.messages if "a trace of this step" in line]
    assert ["in place of an earlier one" in line for line in told] == [False, True]


def test_trace_of_an_engine_has_the_optimizer_phase(cpu_engine: None, tmp_path: Path) -> None:
    engine = make_engine(ds_config(1, block(alpha=0.5)))
    with memplug.attach(engine) as session:
        for step in range(3):
            session.record(tmp_path / "trace.npz")
            x = tokens(step)
            engine.backward(engine(input_ids=x, labels=x).loss)
            engine.step()
    trace = load(tmp_path / "trace.npz")
    kinds = [trace.phases[phase].kind for phase in trace.operators["phase"]]
    assert kinds.count(Pass.OPTIMIZER) > 20 and trace.replays_exactly() is True
    assert trace.fingerprint.parameters == sum(p.numel() for p in engine.module.parameters())


# -- faults ------------------------------------------------------------------------------------------------------------


REFUSE = Recording.refuse  # the original method: a fixture turns refusals into errors


def test_training_continues_if_a_recording_contradicts_itself(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def contradict(self: Recorder, *args: Any) -> None:
        self.drop()
        raise TraceError("not a well-formed trace: `names` holds a name twice")

    monkeypatch.setattr(Recording, "refuse", REFUSE)
    model = Stack(3)
    with memplug.attach(model, {**block(regions=LAYERS), **QUICK}) as session:
        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "end", contradict)
            for _ in range(2):
                session.record(tmp_path / "step.npz")
                train(model, session, 2)
        assert session.trace is None and not (tmp_path / "step.npz").exists()
        assert caplog.text.count("the record of a step contradicts itself: not a well-formed trace") == 1
        session.record()
        train(model, session, 2)
        assert session.trace.replays_exactly() is not False


@pytest.mark.parametrize("parts", [{}, {"tokenwise": {"enabled": False}}])
def test_attaching_without_a_compiler_raises_and_changes_nothing(
    parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise NativeError("memplug's native core cannot be built in /nowhere: no such compiler")

    monkeypatch.setattr("memplug.native.load", refuse)
    for module in (executing, settings):
        monkeypatch.setattr(module, "core", core.__wrapped__)  # without its cache
    model = Stack(2)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(NativeError, match="no such compiler") as error:
        memplug.attach(model, {**block(regions=LAYERS), **parts})
    assert error.value.advice and [type(module) for module in model.modules()] == kinds
    assert "forward" not in vars(model.layers[0])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_in_a_recorded_step_leaves_nothing_behind(error: type[BaseException], tmp_path: Path) -> None:
    model = Stack(3)
    with memplug.attach(model, {**block(regions=LAYERS), **QUICK}) as session:
        train(model, session, 6)
        session.record(tmp_path / "broken.npz")
        train(model, session)

        def fail(*_: Any) -> None:
            raise error("in the middle")

        handle = model.layers[1].register_forward_hook(fail)
        with pytest.raises(error):
            train(model, session)
        handle.remove()
        session.record(tmp_path / "whole.npz")
        train(model, session, 2)  # the first of these steps ends the failed step's recording
        whole = load(tmp_path / "whole.npz")
        assert whole.replays_exactly() is True
        assert {p.micro_batch for p in whole.phases if p.kind is Pass.FORWARD} == {0, 1}
    assert_nothing_left(model)


def test_detaching_during_a_recording_leaves_nothing_behind() -> None:
    model = Stack(2)
    session = memplug.attach(model, block(alpha=0.5, regions=LAYERS))
    session.record()
    train(model, session)
    model(torch.randn(2, 6, 16)).backward()
    session.detach()
    assert_nothing_left(model)
    with pytest.raises(RecorderError, match="detached"):
        session.record()


def test_trace_that_cannot_be_saved_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    model = Stack(2)
    with memplug.attach(model, block(alpha=0.5, regions=LAYERS)) as session:
        session.record(tmp_path / "file" / "trace.npz")
        with caplog.at_level(logging.WARNING, "memplug"):
            train(model, session, 2)
        assert "was not saved" in caplog.text and session.trace is not None


def test_disabled_session_records_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = memplug.attach(Stack(1), {"enabled": False})
    session.record(tmp_path / "trace.npz")
    session.step()
    session.step()
    assert "memplug is off, so no step is recorded" in caplog.text and not any(tmp_path.iterdir())
    assert session.trace is None and session.history == []
