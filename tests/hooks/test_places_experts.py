"""Experts of a mixture count as separate, dynamic layers in forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memplug.hooks.places import Places
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Fingerprint, Layer, Pass, Trace
from tests.support.recording import nothing_left, recorder
from tests.support.truth import where

__all__ = ["nothing_left", "recorder"]


class Expert(nn.Module):
    """An expert whose operators no other module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sinc(x) @ self.weight


class ManyExperts(nn.Module):
    """A layer that calls its experts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList([Expert(), Expert()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([expert(part) for expert, part in zip(self.each, x.split(1), strict=True)])


class ListOfExperts(nn.ModuleList):
    """A list of experts that is never called itself."""


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 4), experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.gate(x).tanh()
        parts = self.experts if isinstance(self.experts, nn.ModuleList) else [self.experts]
        return sum(part(x) for part in parts).tanh()


def record_training(
    recorder: Recorder, model: nn.Module, layers: list[str], forward: Callable[[], torch.Tensor]
) -> tuple[Trace, Places]:
    places = Places(model, [(name, model.get_submodule(name)) for name in layers], recorder)
    places.install()
    recorder.begin(Detail.REQUESTS)
    forward().backward()
    trace = recorder.end(Fingerprint(), places.layers)
    places.remove()
    return trace, places


def layers_of(trace: Trace, name: str) -> set[tuple[Pass, str]]:
    """Return the passes and layers that an operator ran in."""
    found = [index for index, number in enumerate(trace.operators["name"]) if trace.names[number] == name]
    assert found, name
    places = [where(trace, index) for index in found]
    return {(kind, trace.layers[layer].name if layer >= 0 else "") for kind, _, layer in places}


EXPERTS = {
    "a module": (ManyExperts, ["1.experts"]),
    "a list": (lambda: ListOfExperts([Expert(), Expert()]), ["1.experts.0", "1.experts.1"]),
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_inside_layers_are_dynamic_layers(kind: str, recorder: Recorder) -> None:
    make, names = EXPERTS[kind]
    model = nn.Sequential(nn.Linear(4, 4), Mixture(make()), nn.Linear(4, 1))
    trace, places = record_training(recorder, model, ["0", "1", "2"], lambda: model(torch.ones(2, 4)).sum())
    assert places.layers == (Layer("0"), Layer("1"), *(Layer(name, True) for name in names), Layer("2"))
    assert layers_of(trace, "aten::sinc") == {(Pass.FORWARD, name) for name in names}
    assert layers_of(trace, "aten::tanh") == {(Pass.FORWARD, "1")}
    assert layers_of(trace, "aten::tanh_backward") == {(Pass.BACKWARD, "1")}
    places_of_mm = layers_of(trace, "aten::mm")
    assert {layer for kind, layer in places_of_mm if kind is Pass.BACKWARD} == {"0", "1", *names, "2"}
    requests = trace.requests
    dynamic = {trace.layers[layer].name for layer in requests["malloc_layer"][requests["dynamic"]]}
    assert dynamic == set(names) and not requests["dynamic"].all()


def test_experts_that_form_a_layer_are_one_dynamic_layer(recorder: Recorder) -> None:
    model = nn.Sequential(nn.Linear(4, 4), ManyExperts())
    trace, places = record_training(recorder, model, ["0", "1"], lambda: model(torch.ones(2, 4)).sum())
    assert places.layers == (Layer("0"), Layer("1", True))
    assert layers_of(trace, "aten::sinc") == {(Pass.FORWARD, "1")}


def test_nested_experts_belong_to_the_outer_experts(recorder: Recorder) -> None:
    outer = ManyExperts()
    outer.each[0] = ManyExperts()
    outer.each[0].each = nn.ModuleList([Expert()])
    model = nn.Sequential(Mixture(outer), outer)
    _, places = record_training(recorder, model, ["0", "1"], lambda: model(torch.ones(2, 4)).sum())
    assert places.layers == (Layer("0"), Layer("0.experts", True), Layer("1", True))


def test_mixtral_experts_are_dynamic_layers(recorder: Recorder) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    model = MixtralForCausalLM(config)
    x = torch.arange(16).reshape(2, 8)
    names = [f"model.layers.{index}" for index in range(2)]
    trace, places = record_training(recorder, model, names, lambda: model(input_ids=x, labels=x).loss)
    experts = [layer.name for layer in places.layers if layer.dynamic]
    assert experts == [f"model.layers.{index}.mlp.experts" for index in range(2)]
    assert layers_of(trace, "aten::silu") == {(Pass.FORWARD, name) for name in experts}
    assert layers_of(trace, "aten::silu_backward") == {(Pass.BACKWARD, name) for name in experts}
    assert layers_of(trace, "aten::scaled_dot_product_attention") == {(Pass.FORWARD, name) for name in names}
    assert trace.replays_exactly() is True and places.inputs == ["int64[2, 8], int64[2, 8]"]
