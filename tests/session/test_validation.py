"""Operators that run without gradients, in any step and at any point of it, change neither stage nor plan."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import memplug
from memplug.profile.trace import Pass
from memplug.session.table import Stage
from memplug.tokenwise.search import Trial
from tests.support.blocks import LAYERS, Stack
from tests.support.hosts import block, ds_config, make_engine, tokens
from tests.support.serving import train as train_llama
from tests.support.stepping import plans_by_alpha

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("keeps_nothing")]

__all__ = ["plans_by_alpha"]

PROFILER = {"warmup_steps": 2, "policy_steps": 3}
NEEDED = 2 + 1 + 1 + 3  # two repetitions after the first step, one observed step, three plans tried


def run(where: str, every: int, alpha: Any = "auto", micro_batches: int = 2, steps: int = 14) -> memplug.Session:
    """Train a stack with validations, and return the session, still attached."""
    model = Stack(3)
    session = memplug.attach(model, {**block(regions=LAYERS, alpha=alpha), "profiler": PROFILER})
    optimizer = torch.optim.AdamW(model.parameters())

    def validate() -> None:
        model.eval()
        with torch.inference_mode() if where == "inference mode" else torch.no_grad():
            for _ in range(3):
                model(torch.randn(3, 9, 16)).item()
        model.train()

    if where == "before the first step":
        validate()
    for step in range(1, steps + 1):
        for micro_batch in range(micro_batches):
            model(torch.randn(2, 6, 16)).backward()
            if where == "among micro-batches" and step % every == 0 and micro_batch == 0:
                validate()
        optimizer.step()
        optimizer.zero_grad()
        if where == "before the step ends" and step % every == 0:
            validate()
        session.step()
        if where in ("between steps", "inference mode") and step % every == 0:
            validate()
    return session


PLACES = ["between steps", "inference mode", "among micro-batches", "before the step ends", "before the first step"]


@pytest.mark.parametrize("every", [1, pytest.param(2, marks=pytest.mark.long), 5])
@pytest.mark.parametrize("where", PLACES)
def test_periodic_validation_does_not_delay_the_plan(where: str, every: int, plans_by_alpha: None) -> None:
    with run(where, every) as session:
        changes = [(step, stage) for step, stage, _, _ in session.history]
        assert changes == [(3, Stage.GEN_POLICY), (NEEDED, Stage.STABLE)]
        report = session.report()
        assert report.programs == 1 and report.replans == 1 and report.stage == "stable"


@pytest.mark.cpu("its engine is on the CPU")
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_engine_with_periodic_validation_gets_a_plan(cpu_engine: None, stage: int) -> None:
    engine = make_engine(ds_config(stage, {**block(), "profiler": PROFILER}))
    session = memplug.attach(engine)
    for step in range(1, 16):
        x = tokens(step)
        engine.backward(engine(input_ids=x, labels=x).loss)
        engine.step()
        if step % 5 == 0:
            engine.eval()
            with torch.no_grad():
                for _ in range(4):
                    engine(input_ids=x, labels=x)
            engine.train()
    report = session.report()
    session.detach()
    assert report.stage == "stable" and report.replans == 1 and report.arena.served > 0


class Clock:
    """A clock on which seconds pass only when a validation runs."""

    now = 0.0


def trials(validate: bool, monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Return the trials of a stack's session, with a large validation before every second step if `validate` is set."""
    clock, model = Clock(), Stack(3)
    monkeypatch.setattr("memplug.device.device.Device.now_s", lambda device: clock.now)
    config = {**block(regions=LAYERS), "profiler": PROFILER, "arena": {"enabled": False}, "plan_dir": False}
    with memplug.attach(model, config) as session:
        for step in range(1, NEEDED + 1):
            if validate and step % 2:
                with torch.no_grad():
                    model(torch.randn(512, 64, 16))
                clock.now += 1.0
            model(torch.randn(2, 6, 16)).backward()
            search = session._attached.agreed._work.search
            session.step()
        return search._trials


@pytest.mark.cpu("its clock is made up")
def test_validation_affects_neither_time_nor_memory_of_a_tried_plan(
    plans_by_alpha: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trials(True, monkeypatch)
    assert len(found) == 3 and [trial.seconds for trial in found] == [0.0] * 3
    assert [trial.fits for trial in found] == [trial.fits for trial in trials(False, monkeypatch)]
    assert any(trial.fits for trial in found)


def test_generations_of_changing_lengths_stay_out_of_the_arena_plan() -> None:
    model, config = Stack(3), {**block(regions=LAYERS), "profiler": {"warmup_steps": 0, "policy_steps": 0}}
    with memplug.attach(model, config) as session:
        for step in range(40):
            with torch.no_grad():
                for length in range(1, 4 + step % 7):
                    model(torch.randn(7, 40 * length + step, 16))
            model(torch.randn(2, 6, 16)).backward()
            session.step()
        report, plan = session.report().arena, session._attached.boundary.followers.find("arena").plan
    assert report.plans == 1 and report.state == "serving" and report.served > 0
    kinds = [plan.problem.phases[phase].kind for phase in plan.problem.buffers["lower_phase"] if phase >= 0]
    assert Pass.NO_GRAD not in kinds and Pass.FORWARD in kinds


def test_losses_with_validations_between_steps_are_unchanged() -> None:
    expected = train_llama({"enabled": False}, steps=20, validate=5)
    measured = train_llama(block(alpha=1), steps=20, validate=5)
    assert measured.losses == expected.losses and measured.report["arena_served"] > 0


def test_validation_is_not_logged_as_a_change_of_program(caplog: pytest.LogCaptureFixture) -> None:
    # no log line about a validation may read like a fault
    with caplog.at_level(logging.DEBUG, "memplug"):
        run("between steps", 3).detach()
    assert "step 4" in caplog.text
    assert "once it repeats" not in caplog.text and "cosine" not in caplog.text
