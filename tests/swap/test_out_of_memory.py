"""A step that does not fit completes more slowly, with the same numbers, or raises an error with the reason."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memplug
from memplug import native
from tests.support.swapped import GIB, block

pytestmark = pytest.mark.device

LAYERS, WIDTH = 8, 256
ROWS = 10240 if torch.cuda.is_available() else 2048  # on CUDA so many that the allocator reserves the requested size
TENSOR_BYTES = ROWS * WIDTH * 4
LIMIT_BYTES = 14 * TENSOR_BYTES  # a step with all saved tensors on the device takes more than 24 * TENSOR_BYTES


class Deep(nn.Module):
    """A model of residual layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def batch(step: int, rows: int = ROWS) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(step)
    return torch.randn(rows, WIDTH, generator=generator, device="cpu").to(torch.get_default_device())


@contextlib.contextmanager
def device_of(nbytes: int) -> Iterator[float]:
    """Limit the device to `nbytes`, and yield the "device_budget_gib" for it; on the CPU this budget is the limit."""
    if torch.get_default_device().type == "cpu":
        yield nbytes / GIB
        return
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total_bytes)
    try:
        yield nbytes / GIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def losses_of(model: nn.Module, sizes: list[int], session: memplug.Session | None = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, rows in enumerate(sizes):
        loss = model(batch(step, rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
        if session is not None:
            session.step()
    return losses


def technique_of(session: memplug.Session) -> Any:
    return session._attached.boundary.followers.find("swap")


@pytest.fixture
def expected() -> list[float]:
    return losses_of(Deep(), [ROWS] * 8)


def assert_in_order(events: list[tuple[str, int]], may_release: bool) -> None:
    """Assert the order of Algorithm 3.

    First, tensors whose offload has begun are released; then others are offloaded. After each, the request is repeated.
    """
    requests = []
    for kind, nbytes in events:
        if kind == "failed" and (not requests or requests[-1][-1][0] == "served"):
            requests.append([])
        requests[-1].append((kind, nbytes))
    assert requests
    for tried in requests:
        kinds = [kind for kind, _ in itertools.groupby(kind for kind, _ in tried)]
        assert kinds[0] == "failed" and kinds[-1] == "served"
        assert {nbytes for kind, nbytes in tried if kind in ("failed", "served")} == {tried[0][1]}
        middle = kinds[1:-1]
        assert middle[0] == "released" if may_release and "released" in kinds else middle[0] == "left"
        assert "released" not in middle[1:]
        assert all(kind in ("failed", "left", "turned back") for kind in middle[1:])


def test_first_step_that_does_not_fit_completes_by_algorithm_3(expected: list[float]) -> None:
    model = Deep()
    with device_of(LIMIT_BYTES) as budget_gib, memplug.attach(model, block(budget_gib)) as session:
        found = losses_of(model, [ROWS], session)
        technique = technique_of(session)
        assert_in_order(technique.relief, may_release=False)
        first = session.report().swap
        assert first.passive == sum(kind == "left" for kind, _ in technique.relief) > 4
        assert first.passive_bytes == sum(nbytes for kind, nbytes in technique.relief if kind == "left")
    assert found == expected[:1]


@pytest.mark.cpu("its allocator rounds, and earlier blocks are in the way")
def test_recording_is_the_same_whether_or_not_memory_is_short() -> None:
    """Expect the recording to count tensors as in use even while they are offloaded for a failed request."""
    traces = []
    for limit_bytes in (100 * TENSOR_BYTES, LIMIT_BYTES):
        with memplug.attach(model := Deep(), block(limit_bytes / GIB)) as session:
            losses_of(model, [ROWS], session)
            session.record()
            losses_of(model, [ROWS] * 2, session)
            traces.append(session.trace)
            assert (session.report().swap.passive > 0) is (limit_bytes == LIMIT_BYTES)
    roomy, tight = traces
    assert np.array_equal(roomy.events[["kind", "request", "nbytes"]], tight.events[["kind", "request", "nbytes"]])
    assert np.array_equal(roomy.live_bytes - roomy.base_bytes, tight.live_bytes - tight.base_bytes)
    assert tight.live_bytes.max() > LIMIT_BYTES and tight.peak_bytes == tight.live_bytes.max()


def test_steps_under_a_list_have_no_failed_requests(expected: list[float]) -> None:
    model = Deep()
    passive = []
    with device_of(LIMIT_BYTES) as budget_gib, memplug.attach(model, block(budget_gib)) as session:
        session.on_step.append(lambda each: passive.append((each.report().swap.state, each.report().swap.passive)))
        assert losses_of(model, [ROWS] * 8, session) == expected
        report = session.report().swap
    planned = [count for state, count in passive if state == "swapping"]
    assert len(planned) > 3 and len(set(planned)) == 1 and planned[0] > 0
    assert report.released_bytes > 0
    assert report.demanded == report.cancelled == report.refused == 0


def test_batch_longer_than_planned_trains_with_the_same_losses(expected: list[float]) -> None:
    sizes = [ROWS] * 6 + [ROWS * 5 // 4, ROWS, ROWS // 2, ROWS * 5 // 4]
    reference = losses_of(Deep(), sizes)
    model = Deep()
    with device_of(LIMIT_BYTES) as budget_gib, memplug.attach(model, block(budget_gib)) as session:
        assert losses_of(model, sizes, session) == reference
    assert reference[:6] == expected[:6]


def test_failed_request_first_releases_tensors_already_offloaded() -> None:
    """Install a list that releases offloaded tensors too late; memplug then plans a new one."""
    model = Deep()
    with device_of(LIMIT_BYTES) as budget_gib, memplug.attach(model, block(budget_gib)) as session:
        losses_of(model, [ROWS] * 5, session)
        technique = technique_of(session)
        assert session.report().swap.state == "swapping"
        late = tuple(replace(target, release=target.prefetch - 1) for target in technique.part.targets)
        technique.install(replace(technique.part, targets=late))
        session.step()
        twin = copy.deepcopy(model)
        assert losses_of(model, [ROWS], session) == losses_of(twin, [ROWS])
        assert_in_order(technique.relief, may_release=True)
        assert "released" in dict(technique.relief)
        assert session.report().swap.state == "recording"
        passive = 0
        for step in range(4):
            passive = session.report().swap.passive if step == 3 else passive
            assert losses_of(model, [ROWS], session) == losses_of(twin, [ROWS])
        assert session.report().swap.state == "swapping" and session.report().swap.passive == passive


def test_out_of_memory_error_lists_the_remedies() -> None:
    model = Deep()
    with device_of(3 * TENSOR_BYTES) as budget_gib, memplug.attach(model, block(budget_gib)) as session:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            model(batch(0)).backward()
        text = str(raised.value)
        assert "memplug: out of memory in" in text and "offloaded because a request failed" in text
        assert text.count("memplug: out of memory") == 1
        assert all(f"    {number}. " in text for number in (1, 2, 3))
        change = "raise" if torch.get_default_device().type == "cpu" else "lower"  # on the CPU the budget is the limit
        assert f'    1. {change} "device_budget_gib"' in text
        del raised
        model.zero_grad()
        session.step()
        small = Deep()
        assert losses_of(model, [16] * 2, session) == losses_of(small, [16] * 2)


def test_out_of_memory_is_raised_if_host_memory_is_too_small() -> None:
    model = Deep()
    with (
        device_of(LIMIT_BYTES) as budget_gib,
        memplug.attach(model, block(budget_gib, host_budget_gib=TENSOR_BYTES / GIB)) as session,
    ):
        with pytest.raises(torch.OutOfMemoryError, match="memplug: out of memory"):
            losses_of(model, [ROWS], session)
        assert session.report().swap.refused > 0


@pytest.mark.cpu("a device's allocator has reserved more than requested")
def test_failed_step_is_not_used_for_planning() -> None:
    """Limit the device so that the recorded part of the failed step would fit."""
    model = Deep()
    with device_of(3 * TENSOR_BYTES) as budget_gib, memplug.attach(model, block(budget_gib)) as session:
        for _ in range(8):
            with contextlib.suppress(torch.OutOfMemoryError):
                model(batch(0)).backward()
            model.zero_grad()
            session.step()
        report = session.report()
    assert report.recorded_steps > 1 and report.swap.state == "recording"


def test_out_of_memory_error_names_its_snapshot(tmp_path: Path) -> None:
    model = Deep()
    asked = {"report": {"snapshot_on_oom": str(tmp_path)}}
    with device_of(3 * TENSOR_BYTES) as budget_gib, memplug.attach(model, block(budget_gib, **asked)):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            model(batch(0)).backward()
    if torch.get_default_device().type == "cpu":
        assert "no snapshot: the CPU's allocator keeps none" in str(raised.value)
    else:
        assert str(tmp_path / "step000001.pickle") in str(raised.value)
        assert (tmp_path / "step000001.pickle").stat().st_size > 0


def test_detach_ends_the_limit_and_offloading_for_failed_requests() -> None:
    model = Deep()
    with device_of(LIMIT_BYTES) as budget_gib:
        with memplug.attach(model, block(budget_gib)) as session:
            losses_of(model, [ROWS], session)
        if torch.get_default_device().type == "cpu":
            losses_of(model, [ROWS])
        else:
            with pytest.raises(torch.OutOfMemoryError) as raised:
                losses_of(model, [ROWS])
            assert "memplug" not in str(raised.value)


def test_session_deleted_during_a_step_offloads_nothing_afterwards() -> None:
    model = Deep()
    with device_of(LIMIT_BYTES) as budget_gib:
        session = memplug.attach(model, block(budget_gib))
        losses_of(model, [ROWS], session)
        loss = model(batch(1))
        assert session.report().swap.passive > 0
        del session, model
        gc.collect()
        core = native.load()
        assert core.take_relief_events()
        if torch.get_default_device().type == "cpu":
            losses_of(Deep(), [ROWS])
        else:
            with pytest.raises(torch.OutOfMemoryError):
                losses_of(Deep(), [ROWS])
        assert not core.take_relief_events()
        del loss


@pytest.mark.cpu("the limit is the CPU's")
def test_request_that_the_machine_cannot_serve_leaves_the_count_unchanged() -> None:
    core = native.load()
    core.limit_cpu(2**62)
    try:
        before = core.cpu_bytes()[0]
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(2**60, dtype=torch.uint8, device="cpu")
        assert core.cpu_bytes()[0] == before
    finally:
        core.limit_cpu(-1)
