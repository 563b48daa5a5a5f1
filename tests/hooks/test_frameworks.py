"""A framework needs one class in one file and one list entry; disabled and active sessions have the same interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.config import MemplugConfig
from memplug.errors import ConflictError, RegionError
from memplug.hooks import frameworks
from memplug.hooks.framework import AttachTarget, Framework, Layers
from memplug.session.attached import AttachedModel
from memplug.session.session import Disabled, Session
from memplug.session.table import Stage
from tests.support.blocks import Block, assert_same, gradients
from tests.support.hosts import DISABLED, block, fingerprint, tiny_llama


class Network(nn.Module):
    """A network whose layers none of memplug's frameworks recognises."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor, **told: Any) -> torch.Tensor:
        for layer in self.blocks:
            x = layer(x, **told)
        return x


class Trainer:
    """The engine of the toy framework."""

    def __init__(self, network: nn.Module, shards: bool = False):
        self.network, self.shards, self.after_step = network, shards, []

    def advance(self, seed: int) -> None:
        x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed))
        self.network(x).square().mean().backward()
        for call in list(self.after_step):
            call()


class Toy(Framework):
    """A framework as a newcomer would write it."""

    def claim(self, given: Any) -> AttachTarget | None:
        return AttachTarget(given.network, (given.network,), given) if isinstance(given, Trainer) else None

    def is_in(self, target: AttachTarget) -> bool:
        return isinstance(target.engine, Trainer)

    def layers(self, model: nn.Module) -> Layers:
        return [(name, module) for name, module in model.named_modules() if isinstance(module, Block)]

    def check(self, target: AttachTarget, modules: Layers, config: MemplugConfig) -> None:
        if getattr(target.engine, "recomputes", False):
            raise ConflictError("the trainer recomputes", "Switch that off.")

    def regathers(self, target: AttachTarget) -> bool:
        return target.engine.shards

    def prepare(self, target: AttachTarget, name: str, config: MemplugConfig) -> Callable[..., Any]:
        def note(module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
            self.prepared.append(name)
            return call, args, kwargs

        return note

    def hook(self, target: AttachTarget, modules: Layers, attached: AttachedModel) -> None:
        attached.steps_are_marked = True
        target.engine.after_step.append(attached.step)
        attached.at_detach(target.engine.after_step.clear)

    def __init__(self) -> None:
        self.prepared: list[str] = []


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    one = Toy()
    monkeypatch.setattr(frameworks, "FRAMEWORKS", (one, *frameworks.FRAMEWORKS))
    return one


def network() -> Network:
    torch.manual_seed(0)
    return Network()


@pytest.mark.parametrize("shards", [False, True])
def test_new_framework_needs_only_one_class_and_one_list_entry(toy: Toy, shards: bool) -> None:
    trainer, plain = Trainer(network(), shards), Trainer(network())
    before = fingerprint(trainer.network)
    with memplug.attach(trainer, block(alpha=1.0)) as session:
        assert [region.name for region in session._attached.regions] == ["blocks.0", "blocks.1", "blocks.2"]
        assert session._attached.executor.regathers is shards and session._attached.steps_are_marked
        for seed in range(3):
            trainer.advance(seed)
            plain.advance(seed)
            assert_same(gradients(trainer.network), gradients(plain.network), exact=True)
        assert session.steps == 3 and session._attached.executor.transfer.offloads > 0
        assert toy.prepared == ["blocks.0", "blocks.1", "blocks.2"] * 3
        assert memplug.attach(trainer, block(alpha=1.0)) is session
    assert not trainer.after_step and fingerprint(trainer.network) == before


def test_framework_refuses_an_engine_that_recomputes(toy: Toy) -> None:
    trainer = Trainer(network())
    trainer.recomputes = True
    before = fingerprint(trainer.network)
    with pytest.raises(ConflictError, match="the trainer recomputes"):
        memplug.attach(trainer, block(alpha=1.0))
    assert fingerprint(trainer.network) == before and not trainer.after_step


def test_engine_of_an_unlisted_framework_is_refused() -> None:
    with pytest.raises(RegionError, match="not to Trainer"):
        memplug.attach(Trainer(network()))


@pytest.mark.parametrize("off", DISABLED, ids=["absent", "disabled", "all techniques disabled"])
def test_disabled_session_can_be_used_like_an_active_one(off: dict[str, Any]) -> None:
    called: list[str] = []
    with memplug.attach(tiny_llama(), off) as session:
        session.on_step.append(lambda one: called.append(f"step {one.steps}"))
        session.step()
        session.step()
        assert session.report().as_dict() == {"stage": "off"} and not session.config.active
        assert session.solution is session.trace is None and session.history == []
    session.detach()
    assert called == ["step 1", "step 2"] and session.steps == 2 and session.stage is Stage.OFF


def test_disabled_session_has_the_interface_of_an_active_one() -> None:
    def methods(kind: type) -> dict[str, Any]:
        return {name: found for name, found in vars(kind).items() if not name.startswith("_")}

    on, off = methods(Session), methods(Disabled)
    assert on.keys() == off.keys(), "an inherited method would need a model, which a disabled session lacks"
    for name, method in on.items():
        assert type(method) is type(off[name])
        if callable(method):
            assert inspect.signature(method) == inspect.signature(off[name])
    with memplug.attach(tiny_llama(), block()) as session, memplug.attach(tiny_llama(), {}) as other:
        public = [{name for name in vars(each) if not name.startswith("_")} for each in (session, other)]
    assert public[0] == public[1]
