"""Attaching raises an error with the missing name if torch lacks a name that memplug uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug import torch_private
from memplug.errors import UnsupportedVersionError
from memplug.tokenwise.engine.core import core
from tests.support.recording import run_python

BLOCK = {"enabled": True, "tokenwise": {"regions": ["0"], "alpha": 1}, "arena": {"enabled": False}}


def attached() -> Any:
    return memplug.attach(nn.Sequential(nn.Linear(4, 4)), BLOCK)


def refusal() -> str:
    with pytest.raises(UnsupportedVersionError) as error:
        attached()
    return str(error.value)


def test_missing_torch_name_is_reported_at_attach_and_at_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "_lacking", [])
    lacking = torch_private._name("torch._C._no_such_name", "does this and that")
    with pytest.raises(UnsupportedVersionError, match=r"has no torch\._C\._no_such_name, with which memplug does this"):
        lacking(1)
    assert "torch._C._no_such_name" in refusal()


def test_optional_torch_name_is_reported_only_at_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "_lacking", [])
    lacking = torch_private._name("torch.no_such_module.name", "makes estimates", needed=False)
    attached().detach()
    with pytest.raises(UnsupportedVersionError, match="no_such_module"):
        lacking()


def test_installed_torch_has_every_name() -> None:
    assert torch_private._lacking == []


def test_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    assert "needs torch 2.6 or newer; 2.5.1+cu124 is installed" in refusal()


@pytest.mark.parametrize("name", ["_stance", "DynamoStance", "_callback_from_stance"])
def test_missing_compiler_stance_is_reported_at_attach(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"torch._dynamo.eval_frame.{name}")
    assert f"has no torch._dynamo.eval_frame.{name}, with which memplug" in refusal()


def test_compiler_stance_that_torch_ignores_is_reported_at_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._dynamo.eval_frame._callback_from_stance", lambda callback: callback)
    assert "ignores torch._dynamo.eval_frame._stance, with which memplug" in refusal()


def test_compiled_function_runs_uncompiled_inside_regions() -> None:
    compiled = []

    def compile_graph(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda number: number + 1, backend=compile_graph)
    with core().AsWritten():
        assert function(torch.zeros(1)).item() == 1
    assert not compiled
    assert function(torch.zeros(1)).item() == 1
    assert compiled


ATTACHED = f"""
import memplug
from torch import nn
from memplug.tokenwise.engine.core import core

def attached():
    return memplug.attach(nn.Sequential(nn.Linear(4, 4)), {BLOCK!r})

def standing():
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "AutogradCPU")
    return kernel, len(gc.callbacks) - before

before = len(gc.callbacks)
assert standing() == (False, 0)
"""


@pytest.mark.long
def test_last_detach_removes_dispatcher_kernels_and_gc_callback() -> None:
    run_python(
        ATTACHED
        + """
first, second = attached(), attached()
assert standing() == (True, 1)
first.detach()
assert standing() == (True, 1)
second.detach()
assert standing() == (False, 0)
third = attached()
assert standing() == (True, 1)
third.detach()
assert standing() == (False, 0)
dropped = attached()
assert standing() == (True, 1)
del dropped
gc.collect()
assert not standing()[0]
"""
    )


def test_observer_ignores_finalizers_even_if_they_detach_the_session() -> None:
    run_python(
        ATTACHED
        + """
class Detaches:
    def __init__(self, session):
        self.itself, self.session = self, session

    def __del__(self):
        paused.append(core().paused())
        self.session.detach()

paused = []
Detaches(attached())
gc.collect()
assert paused == [1] and core().paused() == 0, paused
attached().detach()
assert standing() == (False, 0)
"""
    )
