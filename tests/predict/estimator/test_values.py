"""A trace of values: the record of a real step on the CPU, and the estimate of that step from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplug
from memplug.errors import EstimateError
from memplug.predict.estimator.values import COPY, NUMBER, Values
from tests.support.forking import launch_forked
from tests.support.values_worker import HIDDEN, LAYERS, TOKENS, Routed

WORKER = "tests.support.values_worker"


def test_estimate_from_a_value_trace_makes_the_requests_of_a_cpu_step(tmp_path: Path) -> None:
    modes = "keep", "full", "memplug"
    for device in ("cpu", "virtual"):
        launch_forked([WORKER, device, tmp_path, *modes], processes=1, module=True)
    cpu, virtual = (json.loads((tmp_path / f"{device}.json").read_text()) for device in ("cpu", "virtual"))
    assert virtual == cpu
    assert 100 < len(cpu["keep"]) < len(cpu["memplug"]) < len(cpu["full"])


def _values(model: nn.Module, step: Callable[[], Any], folder: Path) -> Values:
    with memplug.record_values(model, folder / "values.json"):
        step()
    return Values.read(folder / "values.json")


def test_values_are_recorded_per_module_for_the_first_micro_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(TOKENS, HIDDEN)

    def step() -> None:
        model(x).backward()

    values = _values(model, step, tmp_path)
    assert list(values.calls) == ["", *(f"layers.{index}" for index in range(LAYERS))]
    for index in range(LAYERS):
        (reads,) = values.calls[f"layers.{index}"]
        copy = next(read for read in reads if read.operator == COPY)
        chosen = [read.outputs[0].sizes[0] for read in reads if read.operator == "aten::nonzero"]
        assert sum(chosen) == TOKENS and list(copy.outputs[0].values) == chosen
        assert [read.operator for read in reads].count(NUMBER) == 1
    assert values == _values(model, lambda: (step(), step()), tmp_path), (
        "only the first of two micro-batches is recorded"
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_adds_no_values_to_the_trace(use_reentrant: bool, tmp_path: Path) -> None:
    model, x = Routed(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    kept = _values(model, lambda: model(x).backward(), tmp_path)
    for layer in model.layers:
        run = layer.forward
        layer.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=use_reentrant)
    recomputed = _values(model, lambda: model(x).backward(), tmp_path)
    assert recomputed.calls == kept.calls
    assert all("forward" in vars(layer) for layer in model.layers)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (gradient * 2).max().item()


class _Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, float("inf")]))

    def forward(self) -> torch.Tensor:
        assert self.weight.detach().cpu().numpy()[0] == 1
        assert sum((self.weight.detach()[:1] + number).tolist()[0] for number in range(3)) == 6
        return _Halves.apply(self.weight * 3).sum()


def test_host_copies_are_recorded_once_and_backward_reads_separately(tmp_path: Path) -> None:
    model = _Reads()
    values = _values(model, lambda: model().backward(), tmp_path)
    (reads,) = values.calls[""]
    assert [read.operator for read in reads] == [COPY] * 4
    assert [read.outputs[0].values for read in reads] == [(1, float("inf")), (1,), (2,), (3,)]
    assert [(read.operator, read.outputs[0].values) for read in values.backward] == [(NUMBER, (2.0,))]


def test_step_of_another_model_is_refused_and_a_failed_one_adds_no_file(tmp_path: Path) -> None:
    with pytest.raises(EstimateError, match="no forward of the model"):
        _values(_Reads(), lambda: _Reads()(), tmp_path)
    with pytest.raises(ZeroDivisionError):
        _values(_Reads(), lambda: 1 / 0, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "unreadable"),
        (b"PK\x03\x04", r"a recorded step \(\.npz\)"),
        (b"{}", "no trace of values"),
        (b"\xff", "no trace of values"),
        (b'{"memplug_values": 2, "calls": {}}', "no trace of values"),
    ],
)
def test_file_that_is_not_a_trace_of_values_is_refused(content: bytes | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(EstimateError, match=said):
        Values.read(tmp_path / "file")
