"""A recording has all memory requests of a step on the CPU, in order, as torch's profiler reports them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memplug import native
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Pass, earlier_frees, freed_elsewhere, still_live
from tests.support.blocks import Stack
from tests.support.recording import nothing_left, profiled_requests, record, recorder, request_sizes, trainer

__all__ = ["nothing_left", "recorder"]


def checkpointed(reentrant: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    start = torch.randn(4, 8, requires_grad=True)

    def step() -> None:
        x = start
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        x.sum().backward()
        for parameter in (start, *nn.ModuleList(layers).parameters()):
            parameter.grad = None

    step()
    return step


def attention() -> Callable[[], None]:
    model = Stack(2)
    x = torch.randn(2, 6, 16)

    def step() -> None:
        model(x).backward()
        model.zero_grad()

    step()
    return step


STEPS = {
    "plain": trainer,
    "more rows": lambda: trainer(layers=4, rows=64),
    "attention": attention,
    "checkpointed": lambda: checkpointed(False),
    "checkpointed, reentrant": lambda: checkpointed(True),
}
steps = pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)


# -- of steps ----------------------------------------------------------------------------------------------------------


@steps
@pytest.mark.parametrize("detail", Detail)
def test_requests_match_those_of_the_profiler(
    detail: Detail, make: Callable[[], Callable[[], None]], recorder: Recorder
) -> None:
    step = make()
    for _ in range(2):
        trace = record(recorder, step, detail)
        assert trace.replays_exactly() is True
        assert request_sizes(trace) == profiled_requests(step)
        assert trace.peak_bytes > 0 and trace.base_bytes == trace.live_bytes[-1] == 0


@steps
def test_each_operator_has_the_bytes_in_use_when_it_began(
    make: Callable[[], Callable[[], None]], recorder: Recorder
) -> None:
    kept = []
    record(recorder, lambda: kept.append(torch.ones(25)))
    trace = record(recorder, make())
    before = np.searchsorted(trace.events["operator"], np.arange(len(trace.operators)))
    live = np.concatenate([[trace.base_bytes], trace.live_bytes])  # live bytes after each number of events
    assert np.array_equal(trace.operators["in_use_bytes"], live[before])
    assert trace.base_bytes == 100 and (np.diff(trace.operators["time_ns"]) >= 0).all()


def test_next_recording_frees_persistent_gradients_as_earlier_blocks(
    recorder: Recorder,
) -> None:
    model = nn.Linear(8, 8)

    def step() -> None:
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()

    first, second = record(recorder, step), record(recorder, step)
    grads = 4 * (8 * 8 + 8)
    assert first.requests["nbytes"][still_live(first.requests)].sum() == first.live_bytes[-1] == grads
    assert second.base_bytes == grads == second.live_bytes[-1]
    earlier = second.events[earlier_frees(second.events)]
    assert sorted(earlier["nbytes"]) == [32, 256] and set(earlier["request"]) == {-1}
    model.zero_grad()
    assert native.load().tracked_bytes() == 0, "freed between recordings"
    assert record(recorder, lambda: None).base_bytes == 0


# -- of other threads --------------------------------------------------------------------------------------------------


THREADS, SLOTS = 8, 32


def churn(index: int, rounds: int, slots: list[Any], stop: threading.Event) -> None:
    """Allocate blocks that other threads free, by overwriting their slots."""
    generator = np.random.default_rng(index)
    for nbytes, slot in generator.integers(1, (5000, SLOTS), (rounds, 2)):
        if stop.is_set():
            return
        slots[slot] = torch.empty(nbytes, dtype=torch.uint8)  # frees the block that was in the slot
        torch.ones(64, 8).softmax(0)


def start_churning(rounds: int, slots: list[Any], stop: threading.Event) -> list[threading.Thread]:
    threads = [threading.Thread(target=churn, args=(index, rounds, slots, stop)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def test_requests_of_many_threads_replay_exactly_and_are_freed_once(recorder: Recorder) -> None:
    rounds, slots = 400, [None] * SLOTS

    def step() -> None:
        threads = start_churning(rounds, slots, threading.Event())
        for _ in range(20):
            train()
        for thread in threads:
            thread.join()
        slots.clear()

    train = trainer()
    alone = record(recorder, train)
    trace = record(recorder, step)
    requests = trace.requests
    assert trace.replays_exactly() is True and trace.live_bytes.min() >= 0 == trace.live_bytes[-1]
    assert not still_live(requests).any() and (requests["free_event"] > requests["malloc_event"]).all()
    of_training = requests["malloc_thread"] == 0
    assert requests["nbytes"][of_training].tolist() == 20 * alone.requests["nbytes"].tolist()
    expected = [np.random.default_rng(index).integers(1, (5000, SLOTS), (rounds, 2))[:, 0] for index in range(THREADS)]
    handed = Counter(np.concatenate(expected).tolist())
    assert handed <= Counter(requests["nbytes"][~of_training].tolist())
    assert set(requests["malloc_thread"]) == set(requests["free_thread"]) and len(set(requests["malloc_thread"])) == 9
    assert freed_elsewhere(requests).sum() > 100
    others = requests[~of_training]
    assert {trace.phases[phase].kind for phase in others["malloc_phase"]} == {Pass.OTHER}
    assert set(others["malloc_layer"]) == {-1}


def test_recordings_begin_and_end_while_other_threads_allocate(recorder: Recorder) -> None:
    slots: list[Any] = [None] * SLOTS
    stop = threading.Event()
    threads = start_churning(1_000_000, slots, stop)
    step = trainer()

    def end() -> None:
        stop.set()
        for thread in threads:
            thread.join()
        slots[0] = torch.empty(1000)

    try:
        for index in range(30):
            trace = record(recorder, step, Detail(1 + index % 2))
            assert trace.replays_exactly() is True and trace.live_bytes.min() >= 0
    finally:
        last = record(recorder, end)
    in_use_bytes = last.live_bytes[-1]
    assert in_use_bytes == native.load().tracked_bytes() >= 4000
    cleared = record(recorder, slots.clear)
    assert cleared.base_bytes == in_use_bytes and cleared.live_bytes[-1] == 0 == native.load().tracked_bytes()


def test_recordings_begin_and_end_during_another_threads_backward(recorder: Recorder) -> None:
    # autograd runs a backward without Python's lock; each gradient is a new peak
    weights = [torch.ones(4, requires_grad=True) for _ in range(3000)]
    total = sum(weight.exp().sum() for weight in weights)
    stop = threading.Event()

    def differentiate() -> None:
        while not stop.is_set():
            torch.autograd.grad(total, weights, retain_graph=True)

    thread = threading.Thread(target=differentiate)
    thread.start()
    threads, met = set(), 0
    try:
        while met < 30:
            trace = record(recorder, lambda: None, Detail(1 + met % 2))
            assert trace.replays_exactly() is not False and trace.live_bytes.min(initial=0) >= 0
            threads.update(trace.requests["malloc_thread"].tolist())
            met += len(trace.requests) > 0
    finally:
        stop.set()
        thread.join()
    assert 0 in threads, "a backward counts as training on any thread"


def test_request_names_the_threads_that_made_and_freed_it(recorder: Recorder) -> None:
    blocks: list[torch.Tensor] = []

    def elsewhere(call: Callable[[], Any]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    def step() -> None:
        blocks.append(torch.empty(10))
        elsewhere(blocks.clear)
        elsewhere(lambda: blocks.append(torch.empty(20)))
        blocks.clear()
        elsewhere(lambda: torch.empty(30))

    requests = record(recorder, step).requests
    assert requests["nbytes"].tolist() == [40, 80, 120]
    (own, first), (second, back), (third, same) = requests[["malloc_thread", "free_thread"]].tolist()
    assert own == back == 0 and third == same > 0 and len({0, first, second, third}) == 4
    assert freed_elsewhere(requests).tolist() == [True, True, False]
