"""The sequence has the operators of the training thread, and those of backwards on any thread."""

from __future__ import annotations

import threading

import pytest
import torch

from memplug.profile.recorder import Recorder
from tests.support.recording import in_thread, nested, nothing_left, operator_names, record, recorder, sequence

__all__ = ["nothing_left", "recorder"]
pytestmark = pytest.mark.usefixtures("nothing_left")

OWN_THREADS_FROM = 61  # from this number of nested backwards on, autograd runs them on another thread


def test_operators_of_other_threads_are_in_neither_sequence_nor_trace(recorder: Recorder) -> None:
    x = torch.ones(2)

    def step() -> None:
        x.exp()
        in_thread(x.sin)
        x.cos()

    assert sequence(recorder, step) == ["aten::exp", "aten::cos"]
    assert operator_names(record(recorder, step)) == ["aten::exp", "aten::cos"]


def test_sequence_has_other_threads_backwards_but_not_their_forwards(recorder: Recorder) -> None:
    def step() -> None:
        y = torch.ones(2, requires_grad=True).exp()
        in_thread(lambda: (y.sin(), torch.autograd.backward(y, torch.ones(2)), y.cos()))

    seen = sequence(recorder, step)
    assert "aten::mul.Tensor" in seen and not {"aten::sin", "aten::cos"} & set(seen)
    assert seen.index("aten::exp") < seen.index("aten::mul.Tensor")


def test_backward_on_an_autograd_thread_is_in_the_sequence(recorder: Recorder) -> None:
    threads = []

    def innermost() -> None:
        threads.append(threading.get_ident())
        torch.ones(2).erfinv()

    seen = sequence(recorder, lambda: nested(OWN_THREADS_FROM, innermost).backward())
    assert seen.count("aten::erfinv") == 1
    assert threads != [threading.get_ident()], "autograd ran it on this thread: nest it deeper"
    trace = record(recorder, lambda: nested(OWN_THREADS_FROM, innermost).backward())
    row = operator_names(trace).index("aten::erfinv")
    assert set(trace.events["thread"].tolist()) == {0}
    assert trace.phases[trace.operators["phase"][row]].kind.name == "BACKWARD"


def test_thread_that_makes_the_recorder_is_the_training_thread() -> None:
    made: list[Recorder] = []
    seen: list[list[str]] = []

    def train() -> None:
        made.append(Recorder("cpu"))
        torch.ones(2).exp()
        go.set()
        goes_on.wait()
        seen.append([made[0].names[number] for number in made[0].take()])

    go, goes_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=train)
    thread.start()
    go.wait()
    torch.ones(2).sin()
    goes_on.set()
    thread.join()
    made[0].stop()
    assert seen[0][-1] == "aten::exp"
    again = Recorder("cpu")
    assert sequence(again, torch.ones(2).sin)[-1:] == ["aten::sin"]
    again.stop()


def test_suspension_on_another_thread_hides_no_operators_of_this_thread(recorder: Recorder) -> None:
    inside, done = threading.Event(), threading.Event()

    def suspend() -> None:
        with recorder.suspended:
            inside.set()
            done.wait()

    thread = threading.Thread(target=suspend)
    thread.start()
    inside.wait()
    assert sequence(recorder, torch.ones(2).exp)[-1:] == ["aten::exp"]
    done.set()
    thread.join()
