"""The recorder and the arena, one each per process, go to the first model that trains."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch

import memplug
from memplug.errors import RecorderError
from memplug.session.claim import NOT_ASKED_FOR, TAKEN
from memplug.session.table import Stage
from tests.support.blocks import LAYERS, Stack, assert_same, gradients, twin
from tests.support.hosts import block, ds_config, make_engine, tiny_llama, tokens, train_engine
from tests.support.serving import reserved_bytes

QUICK = {"profiler": {"warmup_steps": 0, "policy_steps": 0}}
BLOCK = {**block(regions=LAYERS), **QUICK}


def train(model: torch.nn.Module, session: memplug.Session, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(2, 6, 16)).backward()
        session.step()


def test_model_that_never_trains_leaves_recorder_and_arena_to_another() -> None:
    reference, model = Stack(2), Stack(2)
    with memplug.attach(reference, BLOCK) as other, memplug.attach(model, BLOCK) as session:
        for _ in range(8):
            with torch.no_grad():
                reference(torch.randn(2, 6, 16))
            train(model, session, 1)
        report = session.report()
        assert report.profiler == "operators" and report.arena.state == "serving" and report.arena.served > 0
        assert report.profiler_off_because is report.arena.off_because is None
        assert other.report().arena.state == "waiting"


def test_first_of_two_training_models_gets_the_arena_and_the_other_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator, critic = Stack(2), Stack(3)
    twins = twin(generator), twin(critic)
    with (
        caplog.at_level(logging.WARNING, "memplug"),
        memplug.attach(critic, {**BLOCK, "tokenwise": {**BLOCK["tokenwise"], "alpha": "auto"}}) as late,
        memplug.attach(generator, BLOCK) as early,
    ):
        for seed in range(10):
            x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed))
            for model, session, plain in ((generator, early, twins[0]), (critic, late, twins[1])):
                model(x).backward()
                plain(x).backward()
                assert_same(gradients(model), gradients(plain), exact=False)
                session.step()
        first, second = early.report(), late.report()
        assert caplog.text.count("goes on without the profiler and the arena") == 1 and "Traceback" not in caplog.text
        assert first.arena.state == "serving" and first.profiler == "operators"
        assert second.arena.state == "off" and second.profiler == "sizes"
        assert second.arena.off_because == second.profiler_off_because == TAKEN
        assert early.stage is late.stage is Stage.STABLE and second.replans == 1, "sizes are enough for a plan"
        with pytest.raises(RecorderError, match="recorder"):
            late.record()


def test_other_model_gets_recorder_and_arena_after_the_first_detaches() -> None:
    first, second = Stack(2), Stack(2)
    with memplug.attach(second, BLOCK) as late:
        with memplug.attach(first, BLOCK) as early:
            train(first, early, 1)
            train(second, late, 8)
            assert late.report().arena.state == "off"
        train(second, late, 12)
        report = late.report()
        assert report.profiler == "operators" and report.arena.served > 0
        assert report.profiler_off_because is report.arena.off_because is None


def test_dropped_session_frees_recorder_and_arena_for_the_next() -> None:
    gc.collect()  # frees objects of earlier tests: DeepSpeed keeps parts of its engines alive
    before = reserved_bytes()
    model = Stack(2)
    session = memplug.attach(model, BLOCK)
    train(model, session, 8)
    assert session.report().arena.state == "serving"
    dropped = weakref.ref(session)
    model.zero_grad()
    del model, session
    gc.collect()
    assert dropped() is None and reserved_bytes() <= before
    model = Stack(2)
    with memplug.attach(model, BLOCK) as session:
        train(model, session, 8)
        assert session.report().arena.state == "serving"


@pytest.mark.parametrize("section", ["arena", "profiler"])
def test_report_gives_the_block_as_the_reason_for_a_disabled_section(section: str) -> None:
    model = Stack(2)
    with memplug.attach(model, {**BLOCK, section: {"enabled": False}}) as session:
        train(model, session, 3)
        assert "block" in session.report().as_dict()[f"{section}_off_because"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokenwise": {"regions": LAYERS, "alpha": 0.5}}, "number for alpha"),
        ({"tokenwise": {"enabled": False}}, "there are no token-wise plans"),
        ({"tokenwise": {"regions": LAYERS, "alpha": 0.5}, "profiler": {"enabled": False}}, NOT_ASKED_FOR),
    ],
)
def test_report_says_why_operators_are_not_compared(fields: dict[str, Any], reason: str) -> None:
    with memplug.attach(Stack(2), {**BLOCK, **fields}) as session:
        report = session.report()
    assert report.profiler == "sizes" and reason in report.profiler_off_because


@pytest.mark.parametrize("stage", [0, 3])
def test_engine_without_optimizer_stays_unattached_beside_a_training_one(
    cpu_engine: None, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    # such as a teacher model, or the reference model of TRL's DPO
    import deepspeed

    config = ds_config(stage, block())
    plain = ds_config(stage)
    without_optimizer = {key: value for key, value in config.items() if key != "optimizer"}

    def losses(config: dict[str, Any], of_reference: dict[str, Any]) -> tuple[list[float], Any]:
        reference = deepspeed.initialize(model=tiny_llama(), config=of_reference)[0]
        engine = make_engine(config)
        found = []
        for seed in range(8):
            x = tokens(seed)
            with torch.no_grad():
                teacher = reference(input_ids=x, labels=x).loss
            loss = engine(input_ids=x, labels=x).loss + 0 * teacher
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found, engine

    expected, _ = losses(plain, {key: value for key, value in plain.items() if key != "optimizer"})
    memplug.install()
    with caplog.at_level(logging.INFO, "memplug"):
        measured, engine = losses(config, without_optimizer)
    assert measured == pytest.approx(expected, rel=1e-5)
    assert caplog.text.count("has no optimizer") == 1
    with memplug.attach(engine) as session:
        report = session.report()
        assert report.stage == "stable" and report.arena.state == "serving" and report.profiler == "operators"


def test_engine_without_optimizer_can_be_attached_explicitly(cpu_engine: None) -> None:
    # the user may train such an engine with an optimizer of their own
    import deepspeed

    config = {key: value for key, value in ds_config(3).items() if key != "optimizer"}
    engine = deepspeed.initialize(model=tiny_llama(), config=config)[0]
    with memplug.attach(engine, block(alpha=0)) as session, torch.no_grad():
        assert torch.isfinite(engine(input_ids=tokens(0), labels=tokens(0)).loss)
        assert session.report().tokenwise.forwards == 0


def test_engines_that_train_in_succession_each_get_the_arena(cpu_engine: None) -> None:
    memplug.install()
    for _ in range(2):
        engine = make_engine(ds_config(1, block()))
        train_engine(engine, 8)
        with memplug.attach(engine) as session:
            assert session.report().arena.served > 0
