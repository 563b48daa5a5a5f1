"""When a session reserves rounding buffers, how large they are, and how plans count them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.device.device import Device
from memplug.profile.trace import Pass
from memplug.session.session import Session
from memplug.tokenwise.budgets import DeviceBudget
from memplug.tokenwise.plan.solver import Budget, PlannedOperator, PlannedRegion
from memplug.tokenwise.rounding import Rounding
from tests.support.blocks import LAYERS, assert_same, gradients, train_stacks
from tests.support.rounding import pair

QUICK = {"warmup_steps": 1, "policy_steps": 0}


def attached(model: nn.Module, alpha: float | str = 1.0, arena: bool = False, **tokenwise: Any) -> Session:
    settings = {"alpha": alpha, "regions": LAYERS, "min_offload_bytes": 1, **tokenwise}
    block = {"enabled": True, "arena": {"enabled": arena}, "tokenwise": settings, "profiler": QUICK, "plan_dir": False}
    return memplug.attach(model, block)


def step(model: nn.Module, reference: nn.Module, session: Session, seed: int = 0, exact: bool = True) -> None:
    train_stacks(model, reference, seed, exact)
    session.step()


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0, "memo", "auto"])
def test_prefetches_allocate_nothing_under_a_plan(alpha: float | str) -> None:
    model, reference = pair()
    with attached(model, alpha) as session:
        before = 0
        for seed in range(8):
            allocations = session.report().tokenwise.transfer_allocations
            planned = session._attached.executor.transfer.buffer_bytes > 0
            step(model, reference, session, seed, exact=alpha in (0, 1))
            before += planned
            assert (session.report().tokenwise.transfer_allocations == allocations) == planned
            assert session.report().stage == "stable" or not session._attached.executor.transfer.buffer_bytes
        assert before >= 5 and session.report().tokenwise.buffer_misses == 0


def test_buffers_are_reserved_before_the_first_planned_step() -> None:
    model, reference = pair()
    with attached(model, "auto") as session:
        while session.solution is None:
            assert session.report().tokenwise.buffer_bytes == 0
            step(model, reference, session, exact=False)
        reserved = session.report().tokenwise.buffer_bytes
        assert session.report().planned_steps == 0 and reserved > 0
        step(model, reference, session, exact=False)
        largest = session._attached.executor.flow.largest_frame_bytes
        assert 0 < 2 * largest <= reserved == session.report().tokenwise.buffer_bytes


def test_counted_allocations_equal_the_requests_that_buffers_save() -> None:
    """Compare the counter that other tests read with the requests that the allocator gets in one step."""

    def requests(buffered: bool) -> tuple[int, int]:
        model, reference = pair()
        with attached(model, 1.0) as session:
            if not buffered:
                session._attached.agreed.rounding.end_step = lambda *args: None
            for seed in range(3):
                step(model, reference, session, seed)
            session.record()
            step(model, reference, session)
            allocations = session._attached.executor.transfer.allocations
            step(model, reference, session)
            phases = [at for at, phase in enumerate(session.trace.phases) if phase.kind is Pass.PREFETCH]
            made = sum(int(row["malloc_phase"]) in phases for row in session.trace.requests)
            return made, session._attached.executor.transfer.allocations - allocations

    (many, counted), (few, none) = requests(buffered=False), requests(buffered=True)
    assert none == few == 0 < counted == many


def test_only_planned_programs_have_buffers_and_detach_frees_them() -> None:
    model, reference = pair()
    session = attached(model, "auto")
    seen = []
    for length in (6, 6, 6, 6, 12, 12, 12, 12, 12, 6, 6):
        x = torch.randn(2, length, 16)
        for network in (model, reference):
            network(x).backward()
        assert_same(gradients(model), gradients(reference), exact=False)
        session.step()
        seen.append((session.stage.value, session.report().tokenwise.buffer_bytes))
    assert {stage for stage, _ in seen} == {"warm-up", "gen-policy", "stable"}
    assert all((nbytes > 0) == (stage == "stable") for stage, nbytes in seen)
    assert seen[-1][1] == max(nbytes for _, nbytes in seen), "programs share the largest buffers"
    session.detach()
    assert session.report().tokenwise.buffer_bytes == 0


@pytest.mark.parametrize("alpha", [1.0, "auto"])
def test_no_buffers_are_reserved_with_the_arena(alpha: float | str) -> None:
    model, reference = pair(4)
    with attached(model, alpha, arena=True, buffers=3) as session:
        for seed in range(7):
            step(model, reference, session, seed, exact=alpha == 1.0)
            assert session.report().tokenwise.buffer_bytes == session.report().tokenwise.buffer_misses == 0
        assert session.report().arena.state == "serving" and session._attached.executor.buffers == 3
        session._attached.boundary.followers.close("a test says so")
        step(model, reference, session, exact=alpha == 1.0)
        step(model, reference, session, exact=alpha == 1.0)
        assert session.report().tokenwise.buffer_bytes > 0, "buffers are needed once the arena is off"


def test_longer_sequence_gets_larger_buffers_after_a_miss() -> None:
    model, reference = pair()
    with attached(model) as session:
        for seed in range(2):
            step(model, reference, session, seed)
        small, allocations = session.report().tokenwise.buffer_bytes, session.report().tokenwise.transfer_allocations
        for _ in range(3):
            x = torch.randn(2, 30, 16)
            for network in (model, reference):
                network(x).backward()
            assert_same(gradients(model), gradients(reference))
            session.step()
            now = session.report().tokenwise
            assert now.buffer_bytes > small and now.transfer_allocations > allocations
            assert now.buffer_misses == now.transfer_allocations - allocations
            misses = now.buffer_misses
        step(model, reference, session)
        assert (
            session.report().tokenwise.buffer_misses == misses
            and session.report().tokenwise.buffer_bytes == now.buffer_bytes
        )


def test_plan_leaves_room_for_buffers_of_the_largest_region() -> None:
    """A buffer holds what the safest setting swaps: the input and attention's output, each with padding."""
    sizes = {"saved": frozenset({1}), "given": frozenset({0}), "forward_s": 1.0, "backward_s": 1.0}
    regions = [
        PlannedRegion(
            key=key,
            instances=4,
            operators=(
                PlannedOperator(
                    name="attention",
                    time_s=1.0,
                    inputs=(0,),
                    outputs=(1,),
                    output_bytes=nbytes,
                    capture="whole",
                    always_swapped=True,
                ),
            ),
            input_bytes=10,
            **sizes,
        )
        for key, nbytes in (("a", 200), ("b", 90))
    ]
    budget = Budget(
        d2h_bytes_per_s=1.0, h2d_bytes_per_s=1.0, host_bytes=1, device_bytes=1000, buffers=3, padding_bytes=5
    )
    left = budget.with_buffers(regions)
    assert left.device_bytes == 1000 - 3 * (210 + 2 * 5) and left.buffers == 3
    assert replace(budget, buffers=0).with_buffers(regions).device_bytes == 1000
    none = replace(budget, device_bytes=659).with_buffers(regions)
    assert none.device_bytes == 659 and none.buffers == 0, "there is no room for buffers"


def test_plan_with_rounding_buffers_keeps_fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect one exception: a plan that keeps everything, since it prefetches nothing."""

    def kept(room_bytes: int, buffers: int) -> tuple[int, bool]:
        model, reference = pair()
        monkeypatch.setattr(DeviceBudget, "room_bytes", lambda *args: room_bytes)
        monkeypatch.setattr(DeviceBudget, "nbytes", 1 << 40)
        with attached(model, "auto", arena=False, buffers=buffers) as session:
            while session.solution is None:
                step(model, reference, session, exact=False)
            plain = session.report().tokenwise.plain_regions == len(session._attached.regions)
            return session.report().tokenwise.predicted_kept_bytes, plain

    everything, plain = kept(1 << 30, 2)
    assert plain
    assert kept(everything, 2) == (everything, True)
    some, plain = kept(everything - 1, 2)
    assert some < everything - 1 and not plain
    less, _ = kept(everything - 1, 4)
    assert less <= some


def test_predicted_peak_includes_the_reserved_buffers() -> None:
    executor = SimpleNamespace(transfer=SimpleNamespace(buffer_bytes=30))
    rounding = Rounding(DeviceBudget(Device()), executor, planned=True)
    assert rounding.peak_bytes(SimpleNamespace(peak_bytes=100)) == 130
    assert rounding.peak_bytes(SimpleNamespace(peak_bytes=None)) is None is rounding.peak_bytes(None)
