"""Each of several watchers of one process's operators sees the same as it would alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memplug.profile.recorder import Detail, Recorder
from memplug.tokenwise.engine.core import core
from memplug.tokenwise.engine.tape import records_of
from tests.support.native_forward import Run
from tests.support.recording import callbacks, in_thread, nothing_left, operator_names, record, recorder, sequence

__all__ = ["nothing_left", "recorder"]
pytestmark = pytest.mark.usefixtures("nothing_left")


def region(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).exp()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 4, requires_grad=True)


@pytest.mark.parametrize("detail", [None, *Detail])
def test_recorder_and_region_forward_see_the_same_together_as_alone(
    recorder: Recorder, x: torch.Tensor, detail: Detail | None
) -> None:
    def recorded(call: Callable[[], object]) -> list[str]:
        return sequence(recorder, call) if detail is None else operator_names(record(recorder, call, detail))

    core()
    alone = recorded(lambda: (region(x), x.sin()))
    without = Run(core(), lambda: region(x))
    runs: list[Run] = []
    together = recorded(lambda: (runs.append(Run(core(), lambda: region(x))), x.sin()))
    assert together == alone and len(alone) > 2
    assert records_of(runs[0].tape) == records_of(without.tape)


def test_recording_inside_a_forward_does_not_change_its_tape(recorder: Recorder, x: torch.Tensor) -> None:
    def recorded_in_part() -> torch.Tensor:
        doubled = x * 2
        traces.append(record(recorder, x.sin, Detail.TENSORS))
        return doubled.exp()

    traces: list[object] = []
    without = Run(core(), lambda: ((x * 2), x.sin())[0].exp())
    assert records_of(Run(core(), recorded_in_part).tape) == records_of(without.tape)
    assert operator_names(traces[0]) == ["aten::sin"]


def test_forward_sees_only_operators_of_its_own_thread(x: torch.Tensor) -> None:
    def beside_another() -> torch.Tensor:
        doubled = x * 2
        in_thread(lambda: torch.ones(3).cos())
        return doubled.exp()

    without = Run(core(), lambda: region(x))
    assert records_of(Run(core(), beside_another).tape) == records_of(without.tape)


def test_forwards_on_two_threads_each_see_their_own_operators(x: torch.Tensor) -> None:
    def around_another() -> torch.Tensor:
        doubled = x * 2
        in_thread(lambda: others.append(Run(core(), lambda: torch.ones(3, requires_grad=True).cos())))
        return doubled.exp()

    others: list[Run] = []
    without = Run(core(), lambda: region(x))
    assert records_of(Run(core(), around_another).tape) == records_of(without.tape)
    assert [str(each.func) for each in records_of(others[0].tape)] == ["aten.ones.default", "aten.cos.default"]


def test_torch_has_callbacks_only_while_operators_are_watched(x: torch.Tensor) -> None:
    core().release()
    assert not callbacks()
    inside: list[bool] = []
    Run(core(), lambda: (inside.append(callbacks()), region(x))[1])
    assert inside == [True] and not callbacks()
