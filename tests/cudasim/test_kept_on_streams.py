"""Scripts that train on two streams and keep tensors of every step.

The arena serves these tensors, their values stay unchanged, and every access is ordered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from tests.cudasim import device
from tests.cudasim.device import SCHEDULES, Schedule, scheduled
from tests.support.two_streams import Beside

pytestmark = pytest.mark.gpu

ALONE = {"enabled": True, "plan_dir": False, "profiler": {"wait_for_plans": True}, "tokenwise": {"enabled": False}}
CHECKED = {**ALONE, "arena": {"checks": True}}
SWAPPED = {**ALONE, "tokenwise": {"alpha": 1, "regions": ["[0-2]"], "min_offload_bytes": 256}}
BLOCKS = {"alone": ALONE, "checked": CHECKED, "swapped": SWAPPED}
ORDERS = [*SCHEDULES, Schedule("random", 1)]
STEPS = 40


class Script:
    """The tensors that a script keeps, made on the main stream or on a second one."""

    def __init__(self) -> None:
        self.side = torch.cuda.Stream()
        self.kept: list[torch.Tensor] = []
        self.window: deque[torch.Tensor] = deque(maxlen=3)

    def on_side(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            return make()


def of_both_streams(script: Script, step: int, out: torch.Tensor) -> None:
    """Make copies on the main stream and on the other one, and keep them to the end."""
    script.kept.append(out.detach()[:, :4].clone())
    source = out.detach()
    source.record_stream(script.side)
    script.kept.append(script.on_side(lambda: source[:, 4:8].clone()))


def for_three_steps(script: Script, step: int, out: torch.Tensor) -> None:
    """Free tensors that the other stream still reads, and keep some results of that stream."""
    script.window.append(out.detach().clone())
    made = script.on_side(lambda: (script.window[0] * 2).cos())
    script.window[0].record_stream(script.side)
    made.record_stream(torch.cuda.current_stream())
    if step % 5 == 0:
        script.kept.append(made)


def freed_on_the_other(script: Script, step: int, out: torch.Tensor) -> None:
    """Make large tensors on the other stream, and free them up to three steps later without a wait for that stream."""
    source = out.detach()
    source.record_stream(script.side)
    script.window.append(script.on_side(lambda: source.repeat(4, 1).exp()))
    if step % 3 == 0:
        script.window.clear()
        script.kept.append(out.detach().mean(0))


def now_and_then(script: Script, step: int, out: torch.Tensor) -> None:
    """Keep some tensors of the other stream for a while, and the first of them to the end."""
    if step % 7 == 0:
        script.kept.append(script.on_side(lambda: torch.full((64, 32), float(step), device="cuda")))
    if step % 20 == 19:
        script.kept = script.kept[:1]


KEEPERS = [of_both_streams, for_three_steps, freed_on_the_other, now_and_then]


def train(keeper: Callable[[Script, int, torch.Tensor], None], block: dict[str, Any]) -> tuple[list[Any], dict]:
    torch.manual_seed(0)
    script = Script()
    model = nn.Sequential(*(Beside(script.side) for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session, losses = memplug.attach(model, block), []
    for step in range(STEPS):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step)).cuda()
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keeper(script, step, out)
        losses.append(loss.detach())
        del out, loss, x
        if session is not None:
            session.step()
    torch.cuda.synchronize()
    found = [value.cpu() for value in [*losses, *script.kept]]
    report = session.report().as_dict() if session is not None else {}
    if session is not None:
        session.detach()
    return found, report


@pytest.mark.parametrize("schedule", ORDERS, ids=str)
@pytest.mark.parametrize("block", BLOCKS.values(), ids=list(BLOCKS))
@pytest.mark.parametrize("keeper", KEEPERS, ids=lambda keeper: keeper.__name__)
def test_arena_serves_kept_tensors_of_two_streams_unchanged(
    keeper: Callable[[Script, int, torch.Tensor], None], block: dict[str, Any], schedule: Schedule
) -> None:
    expected, _ = train(keeper, {"enabled": False})
    before = device.violations()
    with scheduled(schedule):
        found, report = train(keeper, block)
    assert device.violations() == before
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert report["arena_plans"] >= 1
    assert report["arena_step_served"] >= 0.9
