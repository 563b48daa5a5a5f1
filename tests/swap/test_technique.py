"""The life of a swap list: planned, in force, withdrawn; training stays correct throughout."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memplug
from memplug.swap import technique
from memplug.swap.plan.part import plan_part
from tests.support.beside_plain import LAYERS, ROWS, WIDTH, Deep, Training, budget_gib
from tests.support.folders import ROOT
from tests.support.swapped import block

pytestmark = pytest.mark.device


@pytest.fixture(params=["seen", "followed"])
def training(request: pytest.FixtureRequest) -> Training:
    """Return a training under a list; memplug sees its operators ("seen"), or only its requests ("followed").

    Followed steps are explained in test_followed_steps.py.
    """
    training = Training()
    training.until_it_swaps()
    if request.param == "followed":
        training.until_it_repeats()
    return training


def test_list_is_in_force_from_the_step_after_planning(training: Training) -> None:
    assert training.report["swap_tensors"] > 2
    for _ in range(4):
        training.step()
    report, steps = training.report, training.steps - training.began
    assert report["swap_found"] == steps * report["swap_tensors"] and report["swap_missed"] == 0
    assert report["swap_released_bytes"] == steps * report["swap_planned_bytes"]


def test_step_with_one_changed_layer_finds_at_least_half_of_its_tensors(training: Training) -> None:
    report = training.report
    for model in (training.model, training.plain):
        model.layers[LAYERS // 2].register_forward_pre_hook(lambda layer, inputs: (inputs[0] + 1,))
    training.step()
    found = training.report["swap_found"] - report["swap_found"]
    assert found >= report["swap_tensors"] // 2 and training.report["swap_cancelled"] == 0
    for _ in range(4):
        training.step()


def test_planner_gets_measured_time_of_each_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[np.ndarray] = []
    monkeypatch.setattr(technique, "plan_part", lambda *args: given.append(args[2]) or plan_part(*args))
    training = Training()
    training.until_it_swaps()
    part = training.session._attached.boundary.followers.find("swap").part
    assert len(given) == 1
    assert given[0].shape == (len(part.program) + 1,) and 0 <= given[0].min() < given[0].max() < given[0].sum() < 1


@pytest.mark.gpu
def test_impossible_budget_warns_and_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    model = Deep()
    with memplug.attach(model, block(1e-6)) as session:
        for _ in range(6):
            model(torch.randn(ROWS, WIDTH)).backward()
            session.step()
        report = session.report().swap
    assert report.state == "short" and "are too little: operator" in report.off_because
    assert "are too little" in caplog.text and "device_budget_gib" in caplog.text


@pytest.mark.cpu("a device sets a budget by itself")
def test_missing_budget_warns_if_enabled_is_true_but_not_auto(caplog: pytest.LogCaptureFixture) -> None:
    for enabled in ("auto", True):
        config = {**block(1.0), "device_budget_gib": "auto", "swap": {"enabled": enabled}}
        model = Deep()
        with memplug.attach(model, config) as session:
            model(torch.randn(4, WIDTH)).backward()
            session.step()
            assert session.report().swap.state == "off"
            assert "sets no limit" in session.report().swap.off_because
        assert ("sets no limit" in caplog.text) is (enabled is True)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_training_stays_correct_while_its_program_changes(training: Training, share: float) -> None:
    training.model.noise = share
    training.plain.noise = share
    for _ in range(15):
        training.step()


def test_exception_in_forward_leaves_no_tensor_offloaded(training: Training) -> None:
    for fails in (True, False, True):
        training.model.fails = fails
        if fails:
            with pytest.raises(KeyError):
                training.model(training.inputs())
            training.session.step()
            training.model.fails = False
        training.step()
    assert training.away_bytes() == 0


def test_exception_in_backward_leaves_no_tensor_offloaded(training: Training) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise KeyError("in backward")

    layer = training.model.layers[3]
    handle = layer.register_forward_hook(lambda module, args, out: Fails.apply(out))
    with pytest.raises(KeyError):
        training.model(training.inputs()).backward()
    handle.remove()
    training.model.zero_grad()
    training.session.step()
    assert training.away_bytes() == 0
    training.step()


def test_gradients_are_correct_after_detach_with_offloaded_tensors(training: Training) -> None:
    x = training.inputs()
    loss = training.model(x)
    assert training.away_bytes() > 0
    training.session.detach()
    plain = training.plain(x)
    loss.backward()
    plain.backward()
    for one, other in zip(training.model.parameters(), training.plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_graphs_that_outlive_their_step_have_correct_gradients() -> None:
    training = Training()
    training.until_it_swaps()
    x = training.inputs()
    losses = [model(x) for model in (training.model, training.plain)]
    training.session.step()
    other = [model(x * 2) for model in (training.model, training.plain)]
    for early, late in zip(losses, other, strict=True):
        late.backward(retain_graph=True)
        early.backward()
        late.backward()
    training.end()
    grads = [[parameter.grad for parameter in model.parameters()] for model in (training.model, training.plain)]
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


def test_training_stays_correct_with_validation_and_other_lengths(training: Training) -> None:
    for rows in (ROWS, ROWS // 2, ROWS, 2 * ROWS, ROWS):
        with torch.no_grad():
            x = training.inputs(64)
            assert torch.equal(training.model(x), training.plain(x))
        training.step(rows)


def test_hidden_functions_read_correct_saved_tensors(training: Training) -> None:
    """Read a saved tensor by its address, as Triton's kernels do in a custom function."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            assert x.data_ptr() != 0
            return gradient * x.cos()

    for model in (training.model, training.plain):
        model.layers[2].register_forward_hook(lambda module, args, out: Scale.apply(out))
    for _ in range(8):
        training.step()


FORK = """
import os
import torch
from tests.support.beside_plain import Training

training = Training()
training.until_it_swaps()
x = training.inputs()
loss, plain = training.model(x), training.plain(x)
assert training.away_bytes() > 0
child = os.fork()
loss.backward()
plain.backward()
pairs = zip(training.model.parameters(), training.plain.parameters(), strict=True)
assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
training.end()
training.session.detach()
print("both are right")
"""


@pytest.mark.cpu("a child has no device")
def test_fork_with_offloaded_tensors_leaves_both_processes_correct() -> None:
    """Fork a fresh process, since a large one may lack the memory to fork."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0 and "both are right" in done.stdout, done.stderr


def test_second_run_swaps_from_its_first_step(tmp_path: Path) -> None:
    first = Training(asked_gib := budget_gib(), plan_dir=str(tmp_path))
    first.until_it_swaps()
    for _ in range(3):
        first.step()
    planned = first.report["swap_planned_bytes"]
    first.session.detach()
    del first
    gc.collect()
    second = Training(asked_gib, plan_dir=str(tmp_path))
    assert second.report["resumed_from"] is not None
    for _ in range(3):
        second.step()
    report = second.report
    assert report["swap_planned_bytes"] == planned
    assert report["recorded_steps"] == 1 and report["swap_peak_bytes"] is not None, (
        "one step is recorded to measure its peak"
    )
    # memplug sees no operators before a run's first forward, so it misses tensors until it knows the place in the
    # program.
    assert report["swap_found"] + report["swap_missed"] == 3 * report["swap_tensors"]
    assert 2 * report["swap_tensors"] < report["swap_found"]


@pytest.mark.gpu
def test_list_without_host_memory_is_refused() -> None:
    training = Training(host_budget_gib=1e-6)
    for _ in range(6):
        training.step()
    assert "host memory are too little" in training.report["swap_off_because"]
