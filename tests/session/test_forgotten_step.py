"""A training loop that never calls `session.step()` gets one warning with the line to add; other loops get none."""

from __future__ import annotations

import logging

import pytest
import torch

import memplug
from tests.support.blocks import LAYERS, Stack
from tests.support.hosts import block, ds_config, make_engine, train_engine

LINE = "`session.step()` after `optimizer.step()`"


def train(model: torch.nn.Module, steps: int, session: memplug.Session | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(2, 6, 16)).backward()
        optimizer.step()
        if session is not None:
            session.step()


@pytest.mark.parametrize("alpha", [0.5, "auto"])
def test_missing_session_step_warns_once_after_three_optimizer_steps(
    caplog: pytest.LogCaptureFixture, alpha: float | str
) -> None:
    model = Stack(2)
    with caplog.at_level(logging.WARNING, "memplug"), memplug.attach(model, block(alpha=alpha, regions=LAYERS)):
        train(model, 2)
        assert LINE not in caplog.text
        train(model, 120)
    assert caplog.text.count(LINE) == 1 and "stepped 3 times" in caplog.text


def test_training_with_marked_steps_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(2)
    with caplog.at_level(logging.WARNING, "memplug"):
        with memplug.attach(model, block(regions=LAYERS)) as session:
            train(model, 120, session)
    assert LINE not in caplog.text


def test_optimizer_steps_of_another_model_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    # such as the steps of a critic that trains for a while before the generator
    generator, critic = Stack(2), Stack(2)
    with caplog.at_level(logging.WARNING, "memplug"), memplug.attach(generator, block(regions=LAYERS)):
        generator(torch.randn(2, 6, 16)).backward()
        train(critic, 10)
    assert LINE not in caplog.text


def test_engine_marks_its_steps_itself(cpu_engine: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memplug"):
        engine = make_engine(ds_config(1, block(), gradient_accumulation_steps=4))
        with memplug.attach(engine) as session:
            train_engine(engine, 4)
            assert session.steps == 4
    assert LINE not in caplog.text


def test_dropped_session_leaves_no_hook_on_optimizers() -> None:
    import gc

    from torch.optim import optimizer as optimizers

    model = Stack(2)
    session = memplug.attach(model, {**block(regions=LAYERS), "arena": {"enabled": False}})
    assert optimizers._global_optimizer_post_hooks
    del session, model
    gc.collect()
    assert not optimizers._global_optimizer_post_hooks
