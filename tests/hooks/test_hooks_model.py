"""Changes to a model: none when memplug is off, all undone by detach; errors for models that cannot be attached."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.config import MemplugConfig
from memplug.errors import ConflictError, MemplugError, RegionError, UnsupportedVersionError
from tests.support.blocks import Stack, alphas, assert_same, gradients
from tests.support.hosts import DISABLED, block, fingerprint, tiny_llama, tokens, train

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("keeps_nothing")]

HALVES = ["model.layers.*.self_attn", "model.layers.*.mlp"]


def expected_gradients(seed: int = 0, **fields: Any) -> dict[str, torch.Tensor]:
    model = tiny_llama(**fields)
    train(model, seed)
    return gradients(model)


@pytest.mark.parametrize("off", DISABLED, ids=["absent", "disabled", "all techniques disabled"])
def test_attach_with_disabled_block_leaves_model_untouched(off: dict[str, Any], nothing_is_made: None) -> None:
    model = tiny_llama()
    before = fingerprint(model)
    with memplug.attach(model, off) as session:
        assert fingerprint(model) == before
        loss = train(model)
        session.step()
        assert session.report().as_dict() == {"stage": "off"}
    assert fingerprint(model) == before
    assert torch.equal(loss, train(tiny_llama()))
    assert_same(gradients(model), expected_gradients())


@pytest.mark.parametrize("alpha", [1.0, "auto"])
def test_detached_model_is_restored_and_trains_as_without_memplug(alpha: float | str) -> None:
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
    assert session.report().stage == "detached"
    assert fingerprint(model) == after
    train(model)
    assert_same(gradients(model), expected_gradients())


def test_error_inside_the_with_statement_detaches_the_session() -> None:
    model = tiny_llama()
    before = fingerprint(model)
    with pytest.raises(KeyError), memplug.attach(model, block()):
        raise KeyError
    assert fingerprint(model) == before


def test_second_attach_returns_the_same_session() -> None:
    model = tiny_llama()
    session = memplug.attach(model, block())
    assert memplug.attach(model, block()) is session
    assert memplug.attach(model) is session
    assert memplug.attach(model.model, MemplugConfig.model_validate(block())) is session
    session.detach()
    assert memplug.attach(model, block()) is not session


def test_second_attach_with_other_configuration_is_refused() -> None:
    model = tiny_llama()
    with memplug.attach(model, block(alpha=1)):
        with pytest.raises(ConflictError, match="another configuration") as error:
            memplug.attach(model, block(alpha=0))
        assert "Detach" in error.value.advice
        train(model)
        assert_same(gradients(model), expected_gradients())


def test_two_models_have_separate_sessions() -> None:
    one, other = tiny_llama(), tiny_llama()
    with memplug.attach(one, block(alpha=1)) as first, memplug.attach(other, block(alpha=0)) as second:
        assert first is not second
        train(one)
        train(other)
        assert_same(gradients(one), gradients(other))


# -- models that cannot be attached ------------------------------------------------------------------------------------


def test_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
        "checkpointing": (
            checkpointed,
            block(checkpointing="refuse"),
            ConflictError,
            "model.layers.0",
            "gradient_checkpointing_disable",
        ),
        "checkpointing around": (
            checkpointed,
            block(regions=["model.layers.*.mlp"], checkpointing="refuse"),
            ConflictError,
            "model.layers.0",
            "gradient_checkpointing_disable",
        ),
    }


@pytest.mark.parametrize("case", bad_targets())
def test_unsupported_object_is_refused_with_advice_and_stays_unchanged(case: str) -> None:
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
def test_checkpointing_enabled_after_attach_is_refused(regions: Any, reentrant: bool) -> None:
    model = tiny_llama()
    with memplug.attach(model, block(regions=regions, checkpointing="refuse")):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        with pytest.raises(ConflictError, match="model.layers.*(is on|runs inside of a reentrant checkpoint)") as error:
            train(model)
        assert "gradient_checkpointing_disable" in error.value.advice
        del error  # before transformers 5.24, the error's frames keep torch's checkpoint and hooks alive
        model.gradient_checkpointing_disable()
        model.zero_grad()
        train(model)
        assert_same(gradients(model), expected_gradients())


def test_pattern_wildcard_matches_within_one_name_part() -> None:
    model = Stack()
    with memplug.attach(model, block(regions=["layers.*"])) as session:
        assert [region.name for region in session._attached.regions] == [f"layers.{i}" for i in range(4)]
    with memplug.attach(model, block(regions=["layers.[0-2].gate", "layers.3"])) as session:
        names = [region.name for region in session._attached.regions]
        assert names == [*(f"layers.{i}.gate" for i in range(3)), "layers.3"]


# -- an attached model is still that model -----------------------------------------------------------------------------


@alphas
@pytest.mark.parametrize("regions", ["auto", HALVES, ["model.layers.2"]], ids=["layers", "halves", "last layer"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_gradients_with_the_default_cache_equal_those_without_memplug(
    regions: Any, use_cache: bool, alpha: float
) -> None:
    model = tiny_llama(use_cache=use_cache)
    with memplug.attach(model, block(alpha=alpha, regions=regions)) as session:
        for seed in range(2):
            train(model, seed)
            assert_same(gradients(model), expected_gradients(seed), exact=alpha in (0, 1))
            session.step()
        assert session.report().tokenwise.recomputed_in_full == 0


def round_trip(model: nn.Module, protocol: int) -> nn.Module:
    written = pickle.dumps(model, protocol)
    assert b"memplug" not in written, "it must load where memplug is not installed"
    return pickle.loads(written)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy of a layer list": lambda model: (setattr(model.model, "layers", copy.deepcopy(model.model.layers)), model)[1],
    **{f"pickle {protocol}": functools.partial(round_trip, protocol=protocol) for protocol in (2, 5)},
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_an_attached_model_train_without_memplug(how: str) -> None:
    model = tiny_llama()
    layer_class = type(model.model.layers[0])
    session = memplug.attach(model, block(alpha=1))
    train(model)
    model.zero_grad()
    forwards = session.report().tokenwise.forwards
    made = COPIES[how](model)
    assert all(type(layer) is layer_class for layer in made.model.layers)
    assert not any("memplug" in key for module in made.modules() for key in module.__dict__)
    train(made)
    assert_same(gradients(made), expected_gradients())
    assert session.report().tokenwise.forwards == forwards, "the copy is not attached"


def test_attached_modules_with_cyclic_references_can_be_copied() -> None:
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


def test_evaluation_bypasses_the_executor() -> None:
    model, plain = tiny_llama().eval(), tiny_llama().eval()
    x = tokens()
    with memplug.attach(model, block(alpha=1)) as session, torch.no_grad():
        assert torch.equal(model(input_ids=x).logits, plain(input_ids=x).logits)
        assert session.report().tokenwise.forwards == 0
