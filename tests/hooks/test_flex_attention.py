"""FlexAttention inside of regions: compiled calls are units, and run once a step; gradients equal plain torch's."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

import memplug
from memplug.errors import RecomputeError
from memplug.tokenwise.plan.decisions import Setting
from tests.support.blocks import assert_clean, assert_same, gradients, twin
from tests.support.flex_layers import (
    LAYER_COUNT,
    TOKENS,
    WIDTH,
    Attends,
    Biased,
    Counted,
    Frozen,
    Model,
    Opaque,
    SavesMore,
    block,
    compile_with,
    trained,
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let FlexAttention's backward run on the CPU, where torch refuses it for lack of a fused kernel."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.compiler.reset)
        yield


def warnings(caplog: pytest.LogCaptureFixture) -> int:
    """Return how often memplug warned that FlexAttention is not compiled."""
    return sum("FlexAttention is not compiled" in record.message for record in caplog.records)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("layer", [Attends, Biased])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_compiled_attention_compiles_once_and_runs_once_per_step(
    alpha: float,
    layer: type[nn.Module],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted = Counted(backend)
    compile_with(counted, monkeypatch)
    report = trained(alpha, layer, counted=counted)
    assert report["opaque_regions"] == 0 == report["recomputed_in_full"]
    assert report["compiled"] == [(1, LAYER_COUNT), *3 * [(0, LAYER_COUNT)]]
    assert warnings(caplog) == 0


@pytest.mark.parametrize("layer", [Attends, Biased])
def test_planning_does_not_recompile_attention(layer: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    compile_with(counted, monkeypatch)
    report = trained("auto", layer, 16 * (TOKENS,), counted)
    assert report["opaque_regions"] == 0 and report["programs"] >= 1
    assert [graphs for graphs, _ in report["compiled"]] == [1, *15 * [0]]


def test_regions_that_run_as_plain_modules_use_compiled_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    compile_with(counted, monkeypatch)
    model = Model()
    with memplug.attach(model, block("auto", device_budget_gib=1, profiler={"policy_steps": 1})) as session:
        for x in torch.randn(20, 2, TOKENS, WIDTH):
            model(x * 1.0).backward()
            session.step()
        assert session.report().tokenwise.plain_regions == LAYER_COUNT
    assert counted.graphs == 1 and counted.calls == 20 * LAYER_COUNT


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_each_sequence_length_is_compiled_only_once(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    compile_with(counted, monkeypatch)
    report = trained(alpha, Biased, (128, 256, 384, 128, 256, 384), counted)
    assert report["opaque_regions"] == 0
    assert [calls for _, calls in report["compiled"]] == 6 * [LAYER_COUNT]
    assert not any(graphs for graphs, _ in report["compiled"][3:])


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_compiled_attention_runs_once_per_step_under_autocast(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    compile_with(counted, monkeypatch)
    report = trained(alpha, counted=counted, around=lambda: torch.autocast("cpu", torch.bfloat16))
    assert report["opaque_regions"] == 0
    assert report["compiled"][1:] == 3 * [(0, LAYER_COUNT)]


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_opaque_region_runs_compiled_attention_again_in_backward(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    compile_with(counted, monkeypatch)
    report = trained(alpha, Opaque, counted=counted)
    assert report["opaque_regions"] == LAYER_COUNT
    assert report["compiled"] == [(1, 2 * LAYER_COUNT), *3 * [(0, 2 * LAYER_COUNT)]]


@pytest.mark.long
def test_inductor_kernels_form_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    # no operator shows Inductor's kernels; layers are frozen, since Inductor has no kernel for a backward on the CPU
    counted = Counted("inductor")
    compile_with(counted, monkeypatch)
    report = trained(0.0, Frozen, counted=counted)
    assert report["opaque_regions"] == 0
    assert report["compiled"] == [(1, LAYER_COUNT), *3 * [(0, LAYER_COUNT)]]


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_number_of_saved_tensors_may_change_between_steps(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = SavesMore(lambda calls: calls // (2 * LAYER_COUNT) % 3 == 1)
    compile_with(counted, monkeypatch)
    report = trained(alpha, lengths=8 * (TOKENS,), counted=counted)
    assert report["opaque_regions"] == 0
    assert {calls for _, calls in report["compiled"]} == {LAYER_COUNT}


def recomputed(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run two steps; the second step's plan captures nothing, so attention has to run again in backward."""
    compile_with(counted, monkeypatch)
    torch.manual_seed(0)
    model = Model(Biased)
    reference = twin(model)
    with memplug.attach(model, block(0.0)) as session:
        for x in torch.randn(2, 2, TOKENS, WIDTH):
            reference(x * 1.0).backward()
            before = counted.calls
            model(x * 1.0).backward()
            assert_same(gradients(model), gradients(reference))
            session.step()
            for region in session._attached.regions:
                region.set(Setting(region.key, plan={}))
        assert counted.calls - before == 2 * LAYER_COUNT
        assert_clean(session._attached.executor)


def test_attention_runs_again_in_backward_if_the_plan_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    recomputed(counted, monkeypatch)
    assert counted.graphs == 2, "one for the reference, one for the regions"


def test_recompute_pass_that_saves_more_tensors_than_forward_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = 4 * LAYER_COUNT  # calls in two forwards of both models
    with pytest.raises(RecomputeError, match="flex_attention saved"):
        recomputed(SavesMore(lambda calls: calls >= before), monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("is_first_inside", [True, False])
def test_flex_attention_outside_regions_runs_as_without_memplug(
    is_first_inside: bool, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted()
    if is_compiled:
        compile_with(counted, monkeypatch)

    def step(network: Attends, x: torch.Tensor) -> torch.Tensor:
        out = network(x)
        out.sum().backward()
        assert torch.equal(torch.no_grad()(network)(x), out)
        return out

    torch.manual_seed(0)
    model, outside, x = Model(), Attends(), torch.randn(2, TOKENS, WIDTH)
    if not is_first_inside:
        step(outside, x)
        gradients(outside)
    before = counted.graphs
    with memplug.attach(model, block(1.0)):
        if is_first_inside:
            model(x).backward()
            before = counted.graphs
        out = step(outside, x)
        found = gradients(outside)
        assert counted.graphs - before == (1 if is_compiled and is_first_inside else 0), (
            "only the call without gradients is compiled"
        )
        if not is_first_inside:
            model(x).backward()
        before = counted.graphs
        step(outside, x)
        model(x).backward()
        assert counted.graphs == before
    gradients(outside)
    assert torch.equal(out, step(outside, x))
    assert_same(found, gradients(outside))


def test_attention_stays_uncompiled_under_the_force_eager_stance(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted()
    compile_with(counted, monkeypatch)
    with torch.compiler.set_stance("force_eager"):
        assert trained(0.0)["opaque_regions"] == LAYER_COUNT
    assert counted.graphs == 0 == warnings(caplog)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_memplug_warns_once_if_the_caller_of_flex_attention_is_compiled(
    alpha: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @torch.compile(backend="aot_eager")
    def attend(*args: Any, **kwargs: Any) -> Any:
        return flex.flex_attention(*args, **kwargs) * 1.0

    monkeypatch.setattr(Attends, "attention", staticmethod(attend))
    with caplog.at_level(logging.WARNING, "memplug"):
        assert trained(alpha)["opaque_regions"] == LAYER_COUNT
    assert warnings(caplog) == 1


def test_uncompiled_attention_causes_no_memplug_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memplug"):
        trained(0.0)
    assert warnings(caplog) == 0


def test_detach_restores_patched_torch_functions() -> None:
    compiler = torch._dynamo.eval_frame
    before = flex.setup_compilation_env, compiler._callback_from_stance
    first, second = (memplug.attach(Model(), block(1.0)) for _ in range(2))
    assert flex.setup_compilation_env is not before[0] and compiler._callback_from_stance is not before[1]
    first.detach()
    second.detach()
    assert (flex.setup_compilation_env, compiler._callback_from_stance) == before


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_attention_compiled_by_transformers_runs_once_per_step(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    wrapped = pytest.importorskip("transformers.integrations.flex_attention").WrappedFlexAttention
    counted = Counted()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counted))
    monkeypatch.setattr(wrapped, "_instance", None)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYER_COUNT, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, attn_implementation="flex_attention",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    reference = twin(model)
    settings = block(alpha)
    settings["tokenwise"]["regions"] = "auto"
    with memplug.attach(model, settings) as session:
        for step in range(4):
            tokens = torch.randint(64, (2, 128))
            padding = torch.ones_like(tokens)
            padding[0, :5] = 0
            given = {"input_ids": tokens, "labels": tokens, "attention_mask": padding}
            reference(**given).loss.backward()
            before = counted.graphs, counted.calls
            model(**given).loss.backward()
            the_mask = 1  # a compiled function makes the mask, outside of the regions
            expected = 0 if step else 1, LAYER_COUNT + the_mask
            assert (counted.graphs - before[0], counted.calls - before[1]) == expected
            assert_same(gradients(model), gradients(reference))
            session.step()
        assert session.report().tokenwise.opaque_regions == 0
