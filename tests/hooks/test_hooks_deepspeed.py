"""Changes to a DeepSpeed engine and to DeepSpeed itself: none when memplug is off, all undone by detach."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memplug
from memplug.errors import ConfigError, ConflictError, PatchError, UnsupportedVersionError
from memplug.hooks.patching import ORIGINAL, is_patched
from memplug.session.session import Session
from tests.support.blocks import LAYERS, Stack
from tests.support.hosts import DISABLED, block, ds_config, make_engine, tiny_llama, train_engine

PATCHED = {
    "step",
    "backward",
    *(f"{at}_sub_module_{pass_}_function" for at in ("pre", "post") for pass_ in ("forward", "backward")),
}


@pytest.mark.parametrize("off", [None, *DISABLED], ids=["no block", "absent", "disabled", "all techniques disabled"])
@pytest.mark.parametrize("way", ["install", "attach"])
def test_engine_with_disabled_block_trains_as_without_memplug(
    cpu_engine: None, nothing_is_made: None, off: dict[str, Any] | None, way: str
) -> None:
    import deepspeed

    original = deepspeed.initialize
    plain = make_engine(ds_config(memplug=off))
    expected = train_engine(plain, 2)
    names = {name for name, _ in plain.module.named_modules()}
    if way == "install":
        memplug.install()
        assert deepspeed.initialize is not original
    engine = make_engine(ds_config(memplug=off))
    if off is None and way == "install":  # stays patched, since a later engine may have the block
        assert deepspeed.initialize is not original
        memplug.uninstall()
    assert deepspeed.initialize is original
    if way == "attach":
        memplug.attach(engine)
    assert type(engine) is type(plain)
    assert not any(hasattr(value, ORIGINAL) for value in engine.__dict__.values())
    for name in names:
        one, other = engine.module.get_submodule(name), plain.module.get_submodule(name)
        assert type(one) is type(other)
    assert train_engine(engine, 2) == expected
    for name in names:
        assert engine.module.get_submodule(name).__dict__.keys() == plain.module.get_submodule(name).__dict__.keys()
    assert engine.__dict__.keys() == plain.__dict__.keys()
    for parameter, other in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_detach_restores_the_engine_and_training_continues(cpu_engine: None, stage: int) -> None:
    expected = train_engine(make_engine(ds_config(stage)), 4)
    engine = make_engine(ds_config(stage, block(alpha=1)))
    offload = getattr(engine.optimizer, "parameter_offload", None)
    patchable = [one for one in (engine, offload) if one is not None]
    types = [type(module) for module in engine.modules()]
    attributes = [set(one.__dict__) for one in patchable]
    session = memplug.attach(engine)
    assert is_patched(engine, "step")
    losses = train_engine(engine, 2)
    assert session.report().steps == 2 and session.report().tokenwise.offloaded_bytes > 0
    session.detach()
    assert [type(module) for module in engine.modules()] == types
    for one, names in zip(patchable, attributes, strict=True):
        assert not any(hasattr(value, ORIGINAL) for value in one.__dict__.values())
        assert not any("memplug" in name or name in PATCHED for name in set(one.__dict__) - names)
    assert losses + train_engine(engine, 2, first=2) == expected
    assert session.report().steps == 2


def test_engine_with_separately_attached_model_is_refused(cpu_engine: None) -> None:
    model = tiny_llama()
    with memplug.attach(model, block()):
        engine = make_engine(ds_config(memplug=block()), model)
        with pytest.raises(ConflictError, match="to the engine.s model alone") as error:
            memplug.attach(engine)
    assert "attach to the engine" in error.value.advice
    assert isinstance(memplug.attach(engine), Session)


def test_every_step_of_zenflow_counts(cpu_engine: None) -> None:
    """Use an engine whose `step` counts no update, as ZenFlow's does between two full updates."""
    engine = make_engine(ds_config())
    engine.zenflow, engine.step = True, lambda: None
    session = memplug.attach(engine, block())
    engine.step()
    engine.step()
    assert session.steps == 2 and engine.global_steps == 0
    session.detach()


def test_block_refuses_configured_deepspeed_checkpointing(cpu_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    checkpointing = sys.modules["deepspeed.runtime.activation_checkpointing.checkpointing"]
    monkeypatch.setattr(checkpointing, "deepspeed_checkpointing_enabled", False)
    engine = make_engine(ds_config(memplug=block(checkpointing="refuse")))
    deepspeed.checkpointing.configure(None, partition_activations=False, num_checkpoints=1)
    with pytest.raises(ConflictError, match="activation checkpointing is configured") as error:
        memplug.attach(engine)
    assert "checkpointing.configure" in error.value.advice
    assert not is_patched(engine, "step")


def test_swapping_optimizer_states_that_deepspeed_offloads_is_refused(cpu_engine: None) -> None:
    swap = {"enabled": True, "states": True}
    engine = make_engine(ds_config(1, {**block(), "swap": swap}))
    engine.config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    with pytest.raises(ConflictError, match="zero_optimization.offload_optimizer: cpu") as error:
        memplug.attach(engine)
    assert "Remove one of the two" in error.value.advice
    engine.config["zero_optimization"]["offload_optimizer"] = {"device": "none"}
    memplug.attach(engine).detach()


@pytest.mark.parametrize("alpha", [0.4, 1, "auto"])
def test_zero_3_partitions_every_parameter_again_after_training(cpu_engine: None, alpha: Any) -> None:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    expected = train_engine(make_engine(ds_config(3)), 4)
    memplug.install()
    engine = make_engine(ds_config(3, block(alpha=alpha)))
    losses = train_engine(engine, 4)
    if alpha in (0, 1):
        assert losses == expected
    else:
        assert losses == pytest.approx(expected, rel=1e-5)
    for name, parameter in engine.module.named_parameters():
        assert parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE and parameter.numel() == 0, name
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    assert coordinator._PartitionedParameterCoordinator__n_available_params == 0
    assert memplug.attach(engine).report().tokenwise.forwards == 4 * 3


# -- install -----------------------------------------------------------------------------------------------------------


def test_install_is_idempotent_and_uninstall_restores_deepspeed(cpu_engine: None) -> None:
    import deepspeed

    original = deepspeed.initialize
    memplug.install()
    patched = deepspeed.initialize
    assert patched is not original
    assert getattr(patched, ORIGINAL) is original
    memplug.install()
    assert deepspeed.initialize is patched
    memplug.uninstall()
    assert deepspeed.initialize is original
    memplug.uninstall()
    assert deepspeed.initialize is original


def test_error_of_install_names_a_missing_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    monkeypatch.delattr(deepspeed, "initialize")
    with pytest.raises(PatchError, match="deepspeed.initialize"):
        memplug.install()


def test_without_deepspeed_install_raises_but_models_can_be_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UnsupportedVersionError, match="DeepSpeed cannot be imported") as error:
        memplug.install()
    assert "memplug[deepspeed]" in error.value.advice
    memplug.uninstall()
    model = Stack(2)
    with memplug.attach(model, block(regions=LAYERS)) as session:
        for _ in range(2):
            model(torch.randn(2, 6, 16)).backward()
            session.step()
        assert session.report().tokenwise.forwards == 4


@pytest.mark.parametrize("form", ["dict", "path", "args"])
def test_install_reads_the_block_from_a_dict_a_path_or_args(cpu_engine: None, tmp_path: Path, form: str) -> None:
    import argparse

    import deepspeed

    config = ds_config(memplug=block(alpha=0))
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    model = tiny_llama()
    given: dict[str, Any] = {"dict": {"config": config}, "path": {"config": str(path)}}.get(form, {})
    if form == "args":
        given = {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=0)}
    memplug.install()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), **given)[0]
    assert memplug.attach(engine).config.tokenwise.alpha == 0
    assert train_engine(engine, 1) == train_engine(make_engine(ds_config()), 1)
    assert memplug.attach(engine).report().tokenwise.forwards == 3


def test_block_with_errors_stops_deepspeed_initialize(cpu_engine: None) -> None:
    memplug.install()
    with pytest.raises(ConfigError, match="alpha"):
        make_engine(ds_config(memplug=block(aplha=1)))


def test_missing_engine_symbol_leaves_nothing_patched(cpu_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(ds_config(memplug=block()))
    monkeypatch.setattr(type(engine), "backward", None)
    with pytest.raises(PatchError, match="backward") as error:
        memplug.attach(engine)
    assert "deepspeed" in str(error.value)
    assert not is_patched(engine, "step")
    assert {type(layer) for layer in engine.module.model.layers} == {type(tiny_llama().model.layers[0])}


def test_detach_keeps_patches_that_others_made_on_the_engine(cpu_engine: None) -> None:
    engine = make_engine(ds_config(memplug=block()))
    calls = []
    original = engine.step
    engine.step = lambda *args, **kwargs: (calls.append("before"), original(*args, **kwargs))
    session = memplug.attach(engine)
    inner = engine.backward
    engine.backward = lambda *args, **kwargs: (calls.append("after"), inner(*args, **kwargs))
    session.detach()
    train_engine(engine, 1)
    assert calls == ["after", "before"]
