"""Regions of models that memplug does not know: the modules that repeat; a pattern has to match on some rank."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import memplug
from memplug.errors import RegionError
from memplug.hooks.layers import repeated_modules
from tests.support.blocks import Block, Stack, assert_same, gradients, twin
from tests.support.forking import launch_forked
from tests.support.hosts import block


class Residual(nn.Module):
    """A block with state that each forward changes: running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.convolution(x)).relu()


class Own(nn.Module):
    """A block of parameters alone, without layers of torch in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.tanh()


class Numbered(nn.Module):
    """A container like DeepSpeed's pipeline stages: numbered children, and an empty one of another name."""

    def __init__(self, first: int, *layers: nn.Module) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.named_children():
            x = layer(x) if name.isdigit() else x
        return x


def convolutional() -> nn.Module:
    stages = [nn.Sequential(Residual(), Residual()) for _ in range(2)]
    names = ["stem", "stage1", "stage2", "head"]
    head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 64, 16))
    return nn.Sequential(OrderedDict(zip(names, [nn.Conv2d(3, 4, 3, padding=1), *stages, head], strict=True)))


def compiled() -> nn.Module:
    model = Stack(3)
    model.layers[1].compile(backend="eager")
    return model


def scripted() -> nn.Module:
    return nn.Sequential(*(torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU())) for _ in range(3)))


def without_subclasses() -> nn.Module:
    class Sealed(nn.Module):
        def __init_subclass__(cls) -> None:
            raise TypeError("no subclass")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    return nn.Sequential(Sealed(), Sealed(), Block(), Block())


MODELS = {
    "a list": (lambda: Stack(3), ["layers.0", "layers.1", "layers.2"]),
    "a pipeline's stage": (lambda: Numbered(4, nn.Linear(16, 16), Block(), Block(), nn.GELU()), ["5", "6"]),
    "two kinds": (lambda: nn.Sequential(Block(), Own(), Block(), Own()), ["0", "1", "2", "3"]),
    "outermost": (lambda: nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())), ["0", "1"]),
    "stages of convolutions": (convolutional, ["stage1.0", "stage1.1", "stage2.0", "stage2.1"]),
    "one block": (lambda: nn.Sequential(Block(), nn.Linear(16, 16)), []),
    "layers of torch": (lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()), []),
    "scripted": (scripted, []),
    "no subclasses": (without_subclasses, ["2", "3"]),
    "a compiled block": (compiled, ["layers.0", "layers.2"]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_blocks_that_repeat_are_regions(kind: str) -> None:
    make, expected = MODELS[kind]
    assert [name for name, _ in repeated_modules(make())] == expected


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_running_statistics_of_unknown_blocks_stay_exact(alpha: float) -> None:
    torch.manual_seed(0)
    model = convolutional()
    reference = twin(model)
    with memplug.attach(model, block(alpha=alpha)) as session:
        for x in torch.randn(3, 2, 3, 8, 8):
            model(x).square().mean().backward()
            reference(x).square().mean().backward()
            session.step()
            assert_same(gradients(model), gradients(reference), exact=True)
        assert session.report().tokenwise.forwards == 3 * 4
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()), exact=True)


@pytest.mark.parametrize(
    ("model", "patterns"),
    [(Stack(3), '"layers.*"'), (nn.Sequential(nn.Linear(16, 16), Block(), Block()), '"1", "2"')],
    ids=["list", "sequence"],
)
def test_patterns_of_repeated_modules_are_logged(
    model: nn.Module, patterns: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "memplug"):
        memplug.attach(model, block()).detach()
    assert caplog.text.count(f"its regions are the modules that repeat, {patterns};") == 1


def test_model_without_repeated_modules_trains_by_the_arena_alone(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    reference = twin(model)
    with caplog.at_level(logging.INFO, "memplug"), memplug.attach(model, block()) as session:
        for x in torch.randn(8, 4, 16):
            model(x).square().mean().backward()
            reference(x).square().mean().backward()
            assert_same(gradients(model), gradients(reference), exact=True)
            session.step()
        assert session.report().arena.state == "serving"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "has no layers that memplug knows, and no modules that repeat" in warnings[0]


def test_wildcard_steps_over_modules_that_are_never_called() -> None:
    model = Numbered(1, Block(), Block())
    with memplug.attach(model, block(regions=["*"])) as session:
        assert [region.name for region in session._attached.regions] == ["1", "2"]
    with pytest.raises(RegionError, match="module tied_modules, a ModuleDict, is never called itself"):
        memplug.attach(model, block(regions=["tied_modules"]))


@pytest.mark.distributed
def test_stages_of_a_pipeline_may_have_different_regions(tmp_path: Path) -> None:
    launch_forked(["tests.support.pipeline_worker", tmp_path], module=True)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    regions = {
        "auto": [["1", "2", "3"], ["4", "5"]],
        "one stage": [["1", "2"], []],
        "one stage, alpha": [["1", "2"], []],
        "memo": [["1"], []],
        "all": [["0", "1", "2", "3"], ["4", "5", "6"]],
    }
    for case, expected in regions.items():
        assert [rank[case]["regions"] for rank in ranks] == expected
        for rank in ranks:
            assert (rank[case]["stage"], rank[case]["alone"]) == ("stable", None), case
            if case == "one stage, alpha" or case == "all":
                assert rank[case]["losses"] == rank["plain"]["losses"]
                assert rank[case]["weights"] == rank["plain"]["weights"]
            assert rank[case]["losses"] == pytest.approx(rank["plain"]["losses"], rel=1e-5), case
    for rank in ranks:
        assert 'the pattern "9"' in rank["none"]["refused"]
