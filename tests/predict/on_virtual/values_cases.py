"""A model that reads tensors' values gets them from a trace, so it runs as in the recorded step.

Traces of other steps are refused. Each trace records only a forward: torch must know the virtual device before any
backward, so none may run on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplug
from memplug.errors import EstimateError
from memplug.predict.estimator.routed_experts import recorded_counts
from memplug.predict.estimator.values import COPY, NUMBER, Output, Read, Values
from memplug.predict.virtual import VirtualDevice
from tests.support.values_worker import HIDDEN, TOKENS, Routed

REGIONS = {"enabled": True, "tokenwise": {"regions": ["layers.*"], "alpha": 0}, "swap": {"enabled": False}}


class Reads(nn.Module):
    """A module whose forward is `run`, which may call the module `inner`."""

    def __init__(self, run: Callable[[Reads, torch.Tensor], torch.Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight, self.run, self.inner = nn.Parameter(torch.arange(12.0).reshape(3, 4)), run, inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def _ones() -> torch.Tensor:
    return torch.ones(3, 4)


def _recorded(model: nn.Module, x: torch.Tensor, folder: Path) -> Path:
    with memplug.record_values(model, folder / "values.json"):
        model(x)
    return folder / "values.json"


def _estimated(make_model: Callable[[], nn.Module], trace: Path | None, x: torch.Tensor | None = None, **options: Any):
    return memplug.estimate(
        make_model, lambda: _ones() if x is None else x, options.pop("config", None), trace=trace, **options
    )


@pytest.mark.parametrize(
    ("read", "rows"),
    [
        (lambda x: x[x > 9], 2),
        (lambda x: x.masked_select(x > 8), 3),
        (lambda x: x.unique(), 12),
        (lambda x: torch.repeat_interleave(torch.ones_like(x[0]), (x[0] + 1).long()), 10),
        (lambda x: x.new_ones(int(x[2].tolist()[3]) + 2), 13),
        (lambda x: x.new_ones(int(x[2].cpu().numpy()[0])), 8),
        (lambda x: x.new_ones(7 if torch.equal(x, x) else 8), 7),
        (lambda x: x.new_ones(8 if torch.allclose(x, -x) else 7), 7),
        (lambda x: x.new_ones(7 if x[1, 1] > 4 else 8), 7),
    ],
)
def test_value_dependent_sizes_match_the_recorded_step(
    read: Callable[[torch.Tensor], torch.Tensor], rows: int, tmp_path: Path
) -> None:
    found = []

    def run(module: Reads, x: torch.Tensor) -> torch.Tensor:
        given = read(torch.cat((module.weight.detach() + x, module.weight.detach()[:1] * 0)))
        found.append(len(given))
        return module.weight.sum() * given.sum()

    trace = _recorded(Reads(run), _ones() * 0, tmp_path)
    real = found.pop()
    _estimated(lambda: Reads(run), trace, modes=("keep",))
    assert real == rows and set(found) == {rows}


def test_tokens_are_routed_as_in_the_trace_in_every_mode(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN)
    trace = _recorded(Routed(), x, tmp_path)
    found = _estimated(Routed, trace, x, config=REGIONS, modes=("keep", "full", "memplug"))
    flops = 2 * TOKENS * HIDDEN * (HIDDEN + 4) * 3  # each token goes to one expert
    assert flops * 2.5 < found["keep"].flops <= flops * 3 < found["full"].flops <= flops * 4
    with pytest.raises(EstimateError, match="bincount(.|\n)*memplug estimate --trace"):
        _estimated(Routed, None, x, config=REGIONS, modes=("keep",))


class _Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = Routed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_trace_of_a_wrapper_fits_its_model_and_recording_restores_classes(tmp_path: Path) -> None:
    wrapped = _Wrapper()
    before = [type(module) for module in wrapped.modules()]
    x = torch.randn(TOKENS, HIDDEN)
    trace = _recorded(wrapped, x, tmp_path)
    assert [type(module) for module in wrapped.modules()] == before
    assert _estimated(Routed, trace, x, modes=("keep",))["keep"].step_s > 0


def _number(module: Reads, x: torch.Tensor) -> torch.Tensor:
    return module.weight.sum() * x.sum().item()


def _chosen(module: Reads, x: torch.Tensor) -> torch.Tensor:
    return module.weight.flatten()[: len(x.nonzero())].exp().sum()


def _twice(module: Reads, x: torch.Tensor) -> torch.Tensor:
    return module.inner(x) + module.inner(x * 0)


def _recomputed(module: Reads, x: torch.Tensor) -> torch.Tensor:
    return sum(checkpoint(module.inner, x * factor, use_reentrant=False) for factor in (0, 1))


def _reads_numbers(count: int) -> Callable[[Reads, torch.Tensor], torch.Tensor]:
    return lambda module, x: module.weight.sum() * sum(x.sum().item() for _ in range(count))


def _masked(module: Reads, x: torch.Tensor) -> torch.Tensor:
    return sum((module.weight * x).masked_select(x > bound).exp().sum() for bound in (0, 2))


def test_each_call_of_a_module_has_its_own_values(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return Reads(_twice, Reads(_chosen))

    assert _estimated(make, _recorded(make(), _ones(), tmp_path), modes=("keep",))["keep"].step_s > 0


@pytest.mark.parametrize(
    ("recorded", "estimated", "x", "said"),
    [
        (
            lambda: Reads(_number),
            lambda: Reads(_chosen),
            _ones(),
            "the model asks for aten::nonzero at values_cases.py",
        ),
        (lambda: Reads(_chosen), lambda: Reads(_chosen), torch.ones(2, 4), r"of sizes \[2, 4\], .* of \[3, 4\]"),
        (lambda: Reads(_reads_numbers(2)), lambda: Reads(_reads_numbers(3)), _ones(), "has no more than 2"),
        (lambda: Reads(_reads_numbers(2)), lambda: Reads(_reads_numbers(1)), _ones(), "1 times, .* has 2"),
        (
            lambda: Reads(_twice, Reads(_chosen)),
            lambda: Reads(_recomputed, Reads(_chosen)),
            _ones(),
            "module inner reads different values in each call",
        ),
    ],
)
def test_trace_of_another_step_is_refused_with_module_and_operator(
    recorded: Callable[[], nn.Module],
    estimated: Callable[[], nn.Module],
    x: torch.Tensor,
    said: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(EstimateError, match=said):
        _estimated(estimated, _recorded(recorded(), _ones(), tmp_path), x, modes=("keep",))


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Reads(_masked) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x) for layer in self.layers)


def test_recompute_pass_reuses_forward_values_or_raises_if_ambiguous(tmp_path: Path) -> None:
    same = _recorded(_Stack(), 3 * _ones(), tmp_path)  # above both bounds of `_masked`
    assert _estimated(_Stack, same, config=REGIONS, modes=("memplug",))["memplug"].step_s > 0
    other = _recorded(_Stack(), _ones(), tmp_path)
    with pytest.raises(EstimateError, match="a recompute pass runs aten::masked_select again"):
        _estimated(_Stack, other, config=REGIONS, modes=("memplug",))
    assert _estimated(_Stack, other, config=REGIONS, modes=("full",))["full"].step_s > 0


@pytest.mark.parametrize("run", [_chosen, _number])
def test_estimate_logs_values_that_it_makes_up_without_a_trace(
    run: Callable[[Reads, torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING, "memplug"):
        _estimated(lambda: Reads(run), None, modes=("keep",))
        assert "the estimate makes up" in caplog.text and "at values_cases.py" in caplog.text
        caplog.clear()
        _estimated(lambda: Reads(run), _recorded(Reads(run), _ones(), tmp_path), modes=("keep",))
        _estimated(lambda: Reads(lambda module, x: module.weight.sum() if (x > 0).all() else x), None, modes=("keep",))
        assert "makes up" not in caplog.text


def test_experts_of_a_trace_get_drawn_tokens_only_if_they_ran_in_a_loop() -> None:
    def read(outputs: int, *sizes: int) -> Read:
        made = Output(dtype="int64", sizes=(outputs, len(sizes)))
        return Read(line="", operator="aten::nonzero", inputs=(sizes,), outputs=(made,))

    loop = [read(2, 5), read(70, 2, 50), read(30, 2, 50)]
    calls = {"mlp.experts": [loop], "twice.experts": [loop, loop[:2]], "mlp.router": [loop], "none.experts": [loop[:1]]}
    calls |= {"drops.experts": [[*loop[:2], read(20, 2, 50)]], "unlike.experts": [[read(3, 5), *loop[1:]]]}
    found = recorded_counts(Values(calls=calls))
    assert {path: counts.tolist() for path, counts in found.items()} == {"mlp.experts": [70, 30]}


def test_warning_names_sizes_that_each_step_repeats_from_the_trace(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    block = {"enabled": True, "profiler": {"wait_for_plans": True}, "plan_dir": False}
    for run, expected in ((_chosen, True), (_number, False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "memplug"):
            _estimated(
                lambda run=run: Reads(run), _recorded(Reads(run), _ones(), tmp_path), config=block, modes=("keep",)
            )
        assert ("sizes depend on values at aten::nonzero at values_cases.py" in caplog.text) is expected


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.max().item()


def _reads_in_every_way(module: Reads, x: torch.Tensor) -> torch.Tensor:
    host = torch.empty(x.shape, device="cpu")
    host.copy_(x)
    assert len(x.cpu().tolist()) == len(x[0].tolist()) - 1 == 3
    x.to("cpu", non_blocking=True)
    chosen = module.weight.flatten()[: len(x.nonzero())]
    return _Halves.apply(chosen).sum() * x.sum().item()


def test_host_reads_of_forward_and_backward_on_a_device_are_recorded(device: VirtualDevice, tmp_path: Path) -> None:
    model, x = Reads(_reads_in_every_way).to("virtual"), _ones().to("virtual")
    for layer in (model.forward, lambda x: checkpoint(type(model).forward, model, x, use_reentrant=False)):
        model.forward = layer
        with memplug.record_values(model, tmp_path / "values.json"):
            model(x).backward()
        values = Values.read(tmp_path / "values.json")
        (reads,) = values.calls[""]
        assert [read.operator for read in reads] == [COPY] * 4 + ["aten::nonzero", NUMBER]
        assert [read.inputs for read in reads] == [((3, 4),), ((3, 4),), ((4,),), ((3, 4),), ((3, 4),), ((),)]
        assert [(read.operator, read.outputs[0].values) for read in values.backward] == [(NUMBER, (1.0,))]
