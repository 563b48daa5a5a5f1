"""What memplug changes in its hosts: nothing when off, nothing for good when on, clear words where it cannot work."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.config import MemplugConfig
from memplug.errors import ConfigError, ConflictError, MemplugError, PatchError, RegionError, UnsupportedVersionError
from memplug.hooks import deepspeed as deepspeed_hooks
from memplug.session import Session
from tests.blocks import Stack, assert_same, gradients
from tests.hosts import (
    block,
    ds_config,
    fingerprint,
    make_engine,
    process_group,
    tiny_llama,
    tokens,
    train,
    train_engine,
)

PATCHED = {
    "step",
    "backward",
    *(f"{at}_sub_module_{pass_}_function" for at in ("pre", "post") for pass_ in ("forward", "backward")),
}
DISABLED = [{}, {"enabled": False}, {"enabled": True, "tokenwise": {"enabled": False}}]


@pytest.fixture
def cpu_engine(tmp_path: Path) -> Iterator[None]:
    with process_group(tmp_path):
        yield
    memplug.uninstall()


@pytest.fixture
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making an executor, and with it streams and host memory, fails the test."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an executor was made")

    monkeypatch.setattr("memplug.session.Executor", refuse)
    monkeypatch.setattr("memplug.execute.device.Device.new_stream", refuse)


def expected_gradients(seed: int = 0, **fields: Any) -> dict[str, torch.Tensor]:
    model = tiny_llama(**fields)
    train(model, seed)
    return gradients(model)


# -- off means untouched -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", DISABLED, ids=["absent", "disabled", "token-wise disabled"])
def test_attach_with_a_block_that_is_off_leaves_a_model_untouched(off: dict[str, Any], nothing_is_made: None) -> None:
    model = tiny_llama()
    before = fingerprint(model)
    with memplug.attach(model, off) as session:
        assert fingerprint(model) == before
        loss = train(model)
        session.step()
        assert session.report() == {"stage": "off"}
    assert fingerprint(model) == before
    assert torch.equal(loss, train(tiny_llama()))
    assert_same(gradients(model), expected_gradients())


@pytest.mark.parametrize("off", [None, *DISABLED], ids=["no block", "absent", "disabled", "token-wise disabled"])
@pytest.mark.parametrize("way", ["install", "attach"])
def test_an_engine_whose_block_is_off_trains_untouched(
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
    assert deepspeed.initialize is original
    if way == "attach":
        memplug.attach(engine)
    assert type(engine) is type(plain)
    assert not any(hasattr(value, deepspeed_hooks._ORIGINAL) for value in engine.__dict__.values())
    for name in names:
        one, other = engine.module.get_submodule(name), plain.module.get_submodule(name)
        assert type(one) is type(other)
    assert train_engine(engine, 2) == expected
    for name in names:
        assert engine.module.get_submodule(name).__dict__.keys() == plain.module.get_submodule(name).__dict__.keys()
    assert engine.__dict__.keys() == plain.__dict__.keys()
    for parameter, other in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, "auto"])
def test_detach_puts_a_model_back_and_gradients_are_the_plain_ones(alpha: float | str) -> None:
    model = tiny_llama()
    before = fingerprint(model)
    session = memplug.attach(model, block(alpha=alpha))
    assert fingerprint(model) != before
    for _ in range(4):
        train(model)
        session.step()
    model.zero_grad()
    session.detach()
    after = fingerprint(model)
    assert after == before
    session.detach()
    session.step()
    assert session.report()["stage"] == "detached"
    assert fingerprint(model) == after
    train(model)
    assert_same(gradients(model), expected_gradients())


def test_leaving_the_context_detaches_even_by_an_error() -> None:
    model = tiny_llama()
    before = fingerprint(model)
    with pytest.raises(KeyError), memplug.attach(model, block()):
        raise KeyError
    assert fingerprint(model) == before


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_detach_puts_an_engine_back_and_it_trains_on_as_it_would_have(cpu_engine: None, stage: int) -> None:
    expected = train_engine(make_engine(ds_config(stage)), 4)
    engine = make_engine(ds_config(stage, block(alpha=1)))
    offload = getattr(engine.optimizer, "parameter_offload", None)
    patchable = [one for one in (engine, offload) if one is not None]
    types = [type(module) for module in engine.modules()]
    attributes = [set(one.__dict__) for one in patchable]
    session = memplug.attach(engine)
    assert deepspeed_hooks.is_hooked(engine)
    losses = train_engine(engine, 2)
    assert session.report()["steps"] == 2 and session.report()["offloaded_bytes"] > 0
    session.detach()
    assert [type(module) for module in engine.modules()] == types
    for one, names in zip(patchable, attributes, strict=True):
        assert not any(hasattr(value, deepspeed_hooks._ORIGINAL) for value in one.__dict__.values())
        assert not any("memplug" in name or name in PATCHED for name in set(one.__dict__) - names)
    assert losses + train_engine(engine, 2, first=2) == expected
    assert session.report()["steps"] == 2


# -- attaching more than once ------------------------------------------------------------------------------------------


def test_attaching_again_returns_the_session() -> None:
    model = tiny_llama()
    session = memplug.attach(model, block())
    assert memplug.attach(model, block()) is session
    assert memplug.attach(model) is session
    assert memplug.attach(model.model, MemplugConfig.model_validate(block())) is session
    session.detach()
    assert memplug.attach(model, block()) is not session


def test_attaching_with_another_configuration_is_refused() -> None:
    model = tiny_llama()
    with memplug.attach(model, block(alpha=1)):
        with pytest.raises(ConflictError, match="another configuration") as error:
            memplug.attach(model, block(alpha=0))
        assert "Detach" in error.value.advice
        train(model)
        assert_same(gradients(model), expected_gradients())


def test_two_models_have_sessions_of_their_own() -> None:
    one, other = tiny_llama(), tiny_llama()
    with memplug.attach(one, block(alpha=1)) as first, memplug.attach(other, block(alpha=0)) as second:
        assert first is not second
        train(one)
        train(other)
        assert_same(gradients(one), gradients(other))


def test_an_engine_whose_model_is_attached_by_itself_is_refused(cpu_engine: None) -> None:
    model = tiny_llama()
    with memplug.attach(model, block()):
        engine = make_engine(ds_config(memplug=block()), model)
        with pytest.raises(ConflictError, match="by itself") as error:
            memplug.attach(engine)
    assert "attach to the engine" in error.value.advice
    assert isinstance(memplug.attach(engine), Session)


# -- install -----------------------------------------------------------------------------------------------------------


def test_install_is_idempotent_marked_and_undone(cpu_engine: None) -> None:
    import deepspeed

    original = deepspeed.initialize
    memplug.install()
    patched = deepspeed.initialize
    assert patched is not original
    assert getattr(patched, deepspeed_hooks._ORIGINAL) is original
    memplug.install()
    assert deepspeed.initialize is patched
    memplug.uninstall()
    assert deepspeed.initialize is original
    memplug.uninstall()
    assert deepspeed.initialize is original


def test_install_without_a_symbol_to_patch_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    monkeypatch.delattr(deepspeed, "initialize")
    with pytest.raises(PatchError, match="deepspeed.initialize"):
        memplug.install()


@pytest.mark.parametrize("form", ["dict", "path", "args"])
def test_install_reads_the_block_however_the_configuration_is_given(
    cpu_engine: None, tmp_path: Path, form: str
) -> None:
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
    assert memplug.attach(engine).report()["forwards"] == 3


def test_a_block_with_errors_stops_the_engine(cpu_engine: None) -> None:
    memplug.install()
    with pytest.raises(ConfigError, match="alpha"):
        make_engine(ds_config(memplug=block(aplha=1)))


def test_a_missing_symbol_of_the_engine_leaves_nothing_patched(
    cpu_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(ds_config(memplug=block()))
    monkeypatch.setattr(type(engine), "backward", None)
    with pytest.raises(PatchError, match="backward") as error:
        memplug.attach(engine)
    assert "deepspeed" in str(error.value)
    assert not deepspeed_hooks.is_hooked(engine)
    assert {type(layer) for layer in engine.module.model.layers} == {type(tiny_llama().model.layers[0])}


def test_detach_leaves_the_patch_of_someone_else_on_the_instance(cpu_engine: None) -> None:
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


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(UnsupportedVersionError, match="2.6.*2.5.1") as error:
        memplug.attach(tiny_llama(), block())
    assert "Install" in error.value.advice


@pytest.mark.parametrize("version", ["2.6.0", "2.10.0a0+git123", "3.0.0"])
def test_new_torch_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    memplug.attach(tiny_llama(), block()).detach()


def bad_targets() -> dict[str, tuple[Any, dict[str, Any], type[MemplugError], str, str]]:
    replaced = tiny_llama()
    replaced.model.layers[1].forward = replaced.model.layers[1].forward
    checkpointed = tiny_llama()
    checkpointed.gradient_checkpointing_enable()
    on_meta = Stack().to("meta")
    return {
        "no layers": (Stack(), block(), RegionError, "no decoder layers", "tokenwise.regions"),
        "no match": (Stack(), block(regions=["layer.*"]), RegionError, '"layer.*" .* no module', "named_modules"),
        "nested": (
            Stack(),
            block(regions=["layers.1", "layers.*.up"]),
            RegionError,
            "layers.1.up lies inside region layers.1",
            "no region may contain another",
        ),
        "not a module": ("model", block(), RegionError, "not to str", "Pass the engine or the model"),
        "other device": (on_meta, block(regions=["layers.*"]), RegionError, "meta", "Move the model"),
        "no parameters": (nn.Sequential(nn.ReLU()), block(regions=["0"]), RegionError, "0 devices", "Move the model"),
        "replaced forward": (replaced, block(), ConflictError, "model.layers.1 was replaced", "Attach memplug before"),
        "checkpointing": (checkpointed, block(), ConflictError, "model.layers.0", "gradient_checkpointing_disable"),
        "checkpointing around": (
            checkpointed,
            block(regions=["model.layers.*.mlp"]),
            ConflictError,
            "model.layers.0",
            "gradient_checkpointing_disable",
        ),
    }


@pytest.mark.parametrize("case", bad_targets())
def test_what_cannot_be_attached_is_refused_with_advice_and_left_as_it_was(case: str) -> None:
    target, config, kind, problem, advice = bad_targets()[case]
    before = fingerprint(target) if isinstance(target, nn.Module) else None
    with pytest.raises(kind, match=problem) as error:
        memplug.attach(target, config)
    assert advice in error.value.advice
    assert before is None or fingerprint(target) == before


@pytest.mark.parametrize(
    "regions", ["auto", ["model.layers.*.self_attn", "model.layers.*.mlp"]], ids=["layers", "halves"]
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_that_is_switched_on_later_is_refused(regions: Any, reentrant: bool) -> None:
    model = tiny_llama()
    with memplug.attach(model, block(regions=regions)):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        with pytest.raises(ConflictError, match="model.layers.*is on") as error:
            train(model)
        assert "gradient_checkpointing_disable" in error.value.advice
        model.gradient_checkpointing_disable()
        model.zero_grad()
        train(model)
        assert_same(gradients(model), expected_gradients())


def test_configured_deepspeed_checkpointing_is_refused(cpu_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    checkpointing = sys.modules["deepspeed.runtime.activation_checkpointing.checkpointing"]
    monkeypatch.setattr(checkpointing, "deepspeed_checkpointing_enabled", False)
    engine = make_engine(ds_config(memplug=block()))
    deepspeed.checkpointing.configure(None, partition_activations=False, num_checkpoints=1)
    with pytest.raises(ConflictError, match="activation checkpointing is configured") as error:
        memplug.attach(engine)
    assert "checkpointing.configure" in error.value.advice
    assert not deepspeed_hooks.is_hooked(engine)


def test_a_pattern_stays_within_one_part_of_a_name() -> None:
    model = Stack()
    with memplug.attach(model, block(regions=["layers.*"])) as session:
        assert [region.name for region in session.regions] == [f"layers.{i}" for i in range(4)]
    with memplug.attach(model, block(regions=["layers.[0-2].gate", "layers.3"])) as session:
        assert [region.name for region in session.regions] == [*(f"layers.{i}.gate" for i in range(3)), "layers.3"]


# -- models ------------------------------------------------------------------------------------------------------------

HALVES = ["model.layers.*.self_attn", "model.layers.*.mlp"]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("regions", ["auto", HALVES, ["model.layers.2"]], ids=["layers", "halves", "last layer"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_gradients_hold_with_the_cache_that_models_make_by_default(regions: Any, use_cache: bool, alpha: float) -> None:
    model = tiny_llama(use_cache=use_cache)
    with memplug.attach(model, block(alpha=alpha, regions=regions)) as session:
        for seed in range(2):
            train(model, seed)
            assert_same(gradients(model), expected_gradients(seed), exact=alpha != 0.5)
            session.step()
        assert session.report()["recomputed_in_full"] == 0


@pytest.mark.parametrize("regions", ["auto", HALVES[:1]], ids=["layers", "attention"])
def test_a_cache_that_holds_tokens_is_refused_in_training_and_fine_without_gradients(regions: Any) -> None:
    model, plain = tiny_llama(), tiny_llama()
    x = tokens()
    with memplug.attach(model, block(regions=regions)):
        with torch.no_grad():
            measured = model.generate(x, max_new_tokens=3, do_sample=False)
            cache = model(input_ids=x, use_cache=True).past_key_values
            assert cache.get_seq_length() == x.shape[1]
        assert torch.equal(measured, plain.generate(x, max_new_tokens=3, do_sample=False))
        with pytest.raises(ConflictError, match="key-value cache") as error:
            model(input_ids=x, labels=x, past_key_values=cache)
        assert "use_cache=False" in error.value.advice


def round_trip(model: nn.Module, protocol: int) -> nn.Module:
    written = pickle.dumps(model, protocol)
    assert b"memplug" not in written, "it must load where memplug is not installed"
    return pickle.loads(written)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy of a layer list": lambda model: (setattr(model.model, "layers", copy.deepcopy(model.model.layers)), model)[1],
    **{f"pickle {protocol}": functools.partial(round_trip, protocol=protocol) for protocol in (2, 4, 5)},
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_an_attached_model_are_plain_and_work(how: str) -> None:
    model = tiny_llama()
    layer_class = type(model.model.layers[0])
    session = memplug.attach(model, block(alpha=1))
    train(model)
    model.zero_grad()
    forwards = session.report()["forwards"]
    made = COPIES[how](model)
    assert all(type(layer) is layer_class for layer in made.model.layers)
    assert not any("memplug" in key for module in made.modules() for key in module.__dict__)
    train(made)
    assert_same(gradients(made), expected_gradients())
    assert session.report()["forwards"] == forwards, "the copy is not attached"


def test_modules_that_refer_to_one_another_can_be_copied_while_attached() -> None:
    model = Stack(2)
    for layer in model.layers:
        object.__setattr__(layer, "parent", model)
    with memplug.attach(model, block(regions=["layers.*"])):
        made = copy.deepcopy(model)
    assert made.layers[0].parent is made


def test_state_dict_saves_and_loads_while_attached(tmp_path: Path) -> None:
    model, plain = tiny_llama(), tiny_llama()
    with memplug.attach(model, block()):
        assert model.state_dict().keys() == plain.state_dict().keys()
        torch.save(model.state_dict(), tmp_path / "state.pt")
        model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        model.save_pretrained(tmp_path / "pretrained")
    saved = type(plain).from_pretrained(tmp_path / "pretrained")
    for name, value in saved.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_attached_layers_keep_their_class_name_and_signature() -> None:
    import inspect

    model, plain = tiny_llama(), tiny_llama()
    layer, other = model.model.layers[0], plain.model.layers[0]
    with memplug.attach(model, block()):
        assert isinstance(layer, type(other))
        assert (type(layer).__name__, type(layer).__module__) == (type(other).__name__, type(other).__module__)
        assert repr(model) == repr(plain)
        assert inspect.signature(layer.forward) == inspect.signature(other.forward)


def test_evaluation_does_not_go_through_the_executor() -> None:
    model, plain = tiny_llama().eval(), tiny_llama().eval()
    x = tokens()
    with memplug.attach(model, block(alpha=1)) as session, torch.no_grad():
        assert torch.equal(model(input_ids=x).logits, plain(input_ids=x).logits)
        assert session.report()["forwards"] == 0


# -- ZeRO 3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0, 0.5, 1, "auto"])
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
    assert memplug.attach(engine).report()["forwards"] == 4 * 3
