"""Callbacks attach for one training, ignore models that are already attached, and name missing packages."""

from __future__ import annotations

import importlib
import logging
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import memplug
from memplug.errors import ConfigError, MemplugError
from memplug.hooks.regions import attached_to
from memplug.session.table import Stage
from tests.support.hosts import block, tiny_llama, train

WITHOUT_DEEPSPEED = SimpleNamespace(deepspeed_plugin=None)
WITH_DEEPSPEED = SimpleNamespace(deepspeed_plugin=object())


def callback(config: Any = None) -> Any:
    """Return a callback for transformers' trainers."""
    from memplug.integrations.transformers import MemplugCallback

    return MemplugCallback(config)


def begin(one: Any, model: Any, args: Any = WITHOUT_DEEPSPEED) -> None:
    """Begin a training as the trainer does."""
    one.on_train_begin(args, None, None, model=model, optimizer=None)


def test_session_lasts_for_one_training_and_counts_its_steps() -> None:
    model, one = tiny_llama(), callback(block(alpha=1))
    kinds = [type(module) for module in model.modules()]
    begin(one, model)
    assert attached_to(model).session is one.session
    for step in (1, 2):
        train(model)
        one.on_substep_end(WITHOUT_DEEPSPEED, None, None, model=model)
        train(model)
        one.on_step_end(WITHOUT_DEEPSPEED, None, None, model=model)
        assert one.session.report().steps == step
    one.on_train_end(WITHOUT_DEEPSPEED, None, None, model=model)
    assert one.session.stage is Stage.DETACHED and one.session.report().steps == 2
    assert [type(module) for module in model.modules()] == kinds


def test_training_after_a_failed_one_has_a_new_session() -> None:
    first, second, one = tiny_llama(), tiny_llama(), callback(block())
    begin(one, first)
    broken_off = one.session
    begin(one, second)
    assert broken_off.stage is Stage.DETACHED and attached_to(first) is None
    assert attached_to(second).session is one.session is not broken_off


@pytest.mark.parametrize("attached", [False, True], ids=["not attached", "attached"])
def test_callback_does_nothing_under_deepspeed_and_logs_that_once(
    attached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="memplug")
    model, one = tiny_llama(), callback(block())
    session = memplug.attach(model, block(alpha=1)) if attached else None  # in place of an engine's session
    caplog.clear()
    for _ in range(2):
        begin(one, model, WITH_DEEPSPEED)
        one.on_step_end(WITH_DEEPSPEED, None, None, model=model)
        one.on_train_end(WITH_DEEPSPEED, None, None, model=model)
    assert one.session is session
    assert (attached_to(model) is None) is (session is None)
    (said,) = caplog.messages
    assert "under DeepSpeed the callback does nothing" in said
    assert ("memplug.install()" in said) == (not attached)
    if attached:
        assert session.stage is Stage.STABLE and session.report().steps == 0


def test_callback_does_nothing_for_an_attached_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="memplug")
    model, one = tiny_llama(), callback(block())
    with memplug.attach(model, block(alpha=1)) as session:
        begin(one, model)
        one.on_step_end(WITHOUT_DEEPSPEED, None, None, model=model)
        one.on_train_end(WITHOUT_DEEPSPEED, None, None, model=model)
        assert one.session is session and session.stage is Stage.STABLE and session.report().steps == 0
    assert any("attached already" in message for message in caplog.messages)


def test_disabled_block_changes_nothing() -> None:
    model, one = tiny_llama(), callback({"enabled": False})
    begin(one, model)
    one.on_step_end(WITHOUT_DEEPSPEED, None, None, model=model)
    one.on_train_end(WITHOUT_DEEPSPEED, None, None, model=model)
    assert attached_to(model) is None and one.session.report().as_dict() == {"stage": "off"}


def test_invalid_block_is_refused_before_a_trainer_exists() -> None:
    with pytest.raises(ConfigError, match="aplha"):
        callback({"enabled": True, "tokenwise": {"aplha": 1}})


@pytest.mark.parametrize(
    "name, packages",
    [("transformers", ["transformers"]), ("lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"])],
)
def test_callback_without_its_framework_names_the_package_to_install(
    name: str, packages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"memplug.integrations.{name}", raising=False)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MemplugError, match=f"needs {name}, which cannot be imported") as error:
        importlib.import_module(f"memplug.integrations.{name}")
    assert f"pip install '{name}>=" in error.value.advice


def test_callback_can_be_pickled_while_it_trains() -> None:
    model, one = tiny_llama(), callback(block(alpha=1))
    begin(one, model)
    copy = pickle.loads(pickle.dumps(one))
    assert copy.session is None and copy.config == one.config
    copy.end()
    assert attached_to(model).session is one.session
    one.end()
