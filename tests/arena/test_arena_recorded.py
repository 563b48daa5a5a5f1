"""Recordings made with an arena, or after an arena has ended, never free more bytes than were in use."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import memplug
from memplug import native
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Fingerprint, Trace
from tests.support.serving import ALONE, llama, owned

pytestmark = pytest.mark.cpu("of its allocator")

WAITS: dict[str, Any] = {**ALONE, "profiler": {"wait_for_plans": True}}

LIMITED = {**WAITS, "device_budget_gib": 1}
"""The CPU stands in for a device of 1 GiB: memplug counts the bytes of its requests."""


def trained(block: dict[str, Any], steps: int, recorded: range) -> tuple[list[Any], list[Trace]]:
    """Train; return the last output and the model, which hold memory, and the traces of the recorded steps."""
    torch.manual_seed(0)
    model, batch, traces = llama(), torch.randint(0, 64, (2, 16)), []
    with memplug.attach(model, block) as session:
        for step in range(steps):
            if step in recorded:
                session.record()
            out = model(batch, labels=batch)
            out.loss.backward()
            session.step()
            if step - 1 in recorded:
                traces.append(session.trace)
            if step % 2:
                model.zero_grad()
    return [out, model], traces


def freed(kept: list[Any]) -> Trace:
    """Free the objects while a new recorder records, and return its trace."""
    recorder = Recorder("cpu")
    try:
        recorder.begin(Detail.REQUESTS)
        kept.clear()
        gc.collect()
        torch.ones(4)
        return recorder.end(Fingerprint(), [])
    finally:
        recorder.stop()


@pytest.mark.parametrize(
    ("block", "steps", "recorded"), [(WAITS, 9, range(7, 8)), (LIMITED, 4, range(0))], ids=["arena", "limit"]
)
def test_recording_ignores_memory_that_an_earlier_recorder_saw(
    block: dict[str, Any], steps: int, recorded: range
) -> None:
    kept, _ = trained(block, steps, recorded)
    assert owned(kept[0].logits) if block is WAITS else native.load().cpu_bytes()[0] > 0
    trace = freed(kept)
    assert trace.base_bytes == 0 and trace.live_bytes.min() >= 0
    assert trace.requests["nbytes"].tolist() == [16] and (trace.events["request"] >= 0).all()


def test_recordings_with_and_without_a_limit_count_the_same_bytes() -> None:
    """Record consecutive steps; every second one frees its gradients."""
    _, limited = trained(LIMITED, 14, range(1, 13))
    _, others = trained(WAITS, 14, range(1, 13))
    for one, other in zip(limited[3:], others[3:], strict=True):
        assert one.base_bytes == pytest.approx(other.base_bytes, abs=1000), "apart from garbage"
        assert other.base_bytes > 20_000
    for trace in (*limited, *others):
        assert trace.live_bytes.min() >= 0 and trace.replays_exactly()
