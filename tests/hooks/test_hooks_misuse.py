"""User mistakes and calls out of order raise or warn with advice."""

from __future__ import annotations

import logging

import pytest
import torch

import memplug
from memplug.errors import ConflictError, RegionError
from memplug.session import attached as attached_module
from tests.support.blocks import Stack, assert_same, gradients, twin
from tests.support.hosts import block, ds_config, make_engine, train_engine


def regions(*patterns: str) -> dict:
    return block(alpha=1.0, regions=list(patterns))


def test_error_for_pattern_of_module_list_suggests_pattern_of_its_items() -> None:
    with pytest.raises(RegionError) as error:
        memplug.attach(Stack(), regions("layers"))
    assert "layers.*" in error.value.advice


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("layer.*", '"layers.*"'),
        ("layers.7", '"layers.*"'),
        (r"layers\.\d+\.upp", '"layers.*.up"'),
        ("*.up", '"layers.*.up"'),
        ("model.layers.*", '"layers.*"'),
    ],
)
def test_error_for_unmatched_pattern_shows_syntax_and_nearest_patterns(pattern: str, nearest: str) -> None:
    with pytest.raises(RegionError) as error:
        memplug.attach(Stack(), regions(pattern))
    suggested = error.value.problem.partition("the nearest first: ")[2].split(", ")
    assert f'"{pattern}"' in error.value.problem and nearest in suggested
    assert "glob" in error.value.advice and "Name the regions yourself" not in error.value.advice
    for each in suggested:
        memplug.attach(Stack(), regions(each.strip('"'))).detach()


def test_compiled_region_is_refused_with_advice() -> None:
    model = Stack()
    model.layers[0].compile(backend="eager")
    with pytest.raises(ConflictError) as error:
        memplug.attach(model, regions("layers.*"))
    assert "compiled" in error.value.problem and "Attach" in error.value.advice


def test_model_compiled_after_attach_has_the_gradients_of_a_plain_one() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    reference = twin(model)
    x = torch.randn(2, 6, 16)
    reference(x).backward()
    with memplug.attach(model, regions("layers.*")) as session:
        torch.compile(model, backend="eager")(x).backward()
        assert session._attached.executor.flow.forwards == 2
    torch._dynamo.reset()
    assert_same(gradients(model), gradients(reference))


def test_backward_after_detach_raises() -> None:
    model = Stack(4)
    with memplug.attach(
        model, {**regions("layers.*"), "tokenwise": {"min_offload_bytes": 1, **regions("layers.*")["tokenwise"]}}
    ):
        loss = model(torch.randn(2, 6, 16))
    with pytest.raises(ConflictError, match="detached"):
        loss.backward()


def test_training_without_session_step_calls_warns_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_module, "UNMARKED_FORWARDS", 3)
    model = Stack(2)
    with caplog.at_level(logging.WARNING, "memplug"), memplug.attach(model, block(alpha="auto", regions=["layers.*"])):
        for _ in range(6):
            model(torch.randn(2, 6, 16)).backward()
    assert caplog.text.count("session.step()") == 1


def test_warning_names_regions_that_never_run(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(2)
    with caplog.at_level(logging.WARNING, "memplug"):
        with memplug.attach(model, block(alpha="auto", regions=["layers.*"])) as session:
            for _ in range(4):
                session.step()
    assert caplog.text.count("no region ran") == 1 and "layers.0" in caplog.text


def test_engine_with_a_block_attaches_after_an_engine_without_one(cpu_engine: None) -> None:
    memplug.install()
    try:
        make_engine(ds_config())
        engine = make_engine(ds_config(memplug=block(alpha=1.0)))
        with memplug.attach(engine) as session:
            assert session.report().tokenwise.regions == 3
    finally:
        memplug.uninstall()


def test_attach_to_engine_without_block_warns(cpu_engine: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memplug"):
        assert memplug.attach(make_engine(ds_config())).report().as_dict() == {"stage": "off"}
    assert 'no "memplug" block' in caplog.text


def test_deepcompile_of_an_attached_engine_is_refused_with_advice(
    cpu_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use AutoSP with another backend, since AutoSP's own changes torch for the rest of the process."""
    config = ds_config(memplug=block(), compile={"deepcompile": True, "passes": ["autosp"]})
    engine = make_engine(config)
    monkeypatch.setattr(type(engine), "get_autosp_backend", lambda self, options: "eager")
    session = memplug.attach(engine)
    with pytest.raises(ConflictError, match="DeepCompile compiles the engine's whole model") as error:
        engine.compile(backend="eager")
    assert error.value.code == "MP003" and "deepcompile" in error.value.advice
    session.detach()
    again = make_engine(config)
    memplug.attach(again).detach()
    again.compile(backend="eager")
    assert again.is_deepcompile_active()


def test_attached_engine_whose_deepcompile_falls_back_trains_as_plain(cpu_engine: None) -> None:
    """Use ZeRO 0, which DeepCompile's own passes do not support: DeepSpeed falls back to torch.compile."""
    config = ds_config(compile={"deepcompile": True})
    expected = train_engine(make_engine(ds_config()), 3)
    engine = make_engine(config)
    session = memplug.attach(engine, block(alpha=1))
    engine.compile(backend="eager")
    assert not engine.is_deepcompile_active()
    assert train_engine(engine, 3) == expected
    assert session.report().tokenwise.forwards == 3 * 3
    session.detach()
