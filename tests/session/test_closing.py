"""A session's last line, at detach or as the process ends, says what the session did or why it did nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import memplug
from memplug.session import closing
from memplug.tokenwise.plan import solver as plan
from tests.support.blocks import LAYERS, Stack
from tests.support.forking import launch_forked
from tests.support.hosts import block

QUICK = {"profiler": {"warmup_steps": 0, "policy_steps": 0}}


def last_line(caplog: pytest.LogCaptureFixture, steps: int, forwards: int = 1, **fields: Any) -> str:
    """Run `steps` steps of `forwards` forwards each, detach, and return the session's last line."""
    model = Stack(3)
    with caplog.at_level(logging.INFO, "memplug"):
        with memplug.attach(model, {**block(regions=LAYERS), **QUICK, **fields}) as session:
            for _ in range(max(steps, 1)):
                for _ in range(forwards):
                    model(torch.randn(2, 6, 16)).backward()
                if steps:
                    session.step()
            report = session.report()
    line = caplog.messages[-1]
    assert line.startswith(f"memplug: detached: after {steps} steps")
    assert caplog.text.count("steps;") == 1
    if report.planned_steps:
        assert f"{report.planned_steps} of them planned" in line
    return line


def test_last_line_of_a_planned_run_gives_swap_arena_and_savings(caplog: pytest.LogCaptureFixture) -> None:
    line = last_line(caplog, 10)
    assert "8 of them planned" in line, "the program was seen, then observed"
    assert "KiB swapped" in line and "% of bytes served by the arena; " in line
    assert line.endswith("% of the arena's bytes in use at the peak")
    assert "by its own estimate the plan saves" in line and "recomputed in full" in line


@pytest.mark.parametrize(
    ("steps", "forwards", "fields", "reason"),
    [
        (0, 1, {}, "nothing was planned: no step ended (`session.step()` marks its end)"),
        (5, 0, {}, "nothing was planned: no region ran forward with gradients"),
        (3, 1, {"profiler": {"warmup_steps": 9}}, "nothing was planned: a plan takes at least 11 steps of one program"),
    ],
)
def test_last_line_of_an_unplanned_run_gives_the_reason(
    caplog: pytest.LogCaptureFixture, steps: int, forwards: int, fields: dict[str, Any], reason: str
) -> None:
    line = last_line(caplog, steps, forwards, **fields)
    assert reason in line and "saves" not in line


@pytest.mark.parametrize("is_marked", [False, True])
def test_last_line_suggests_session_step_only_if_no_hook_marks_steps(is_marked: bool) -> None:
    model = Stack(2)
    with pytest.raises(ZeroDivisionError), memplug.attach(model, {**block(regions=LAYERS), **QUICK}) as session:
        session._attached.steps_are_marked = is_marked
        model(torch.randn(2, 6, 16)).backward()
        said = closing.line(session._attached)
        raise ZeroDivisionError
    assert "nothing was planned: no step ended" in said
    assert ("session.step()" in said) is not is_marked


def test_last_line_does_not_mention_plans_if_alpha_is_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = last_line(caplog, 4, arena={"enabled": False}, tokenwise={"alpha": 0.5, "regions": LAYERS})
    assert "planned" not in line and "no arena: the block switches it off" in line


def test_full_recomputation_estimate_reruns_all_operators_and_swaps_none() -> None:
    operators = tuple(
        plan.PlannedOperator(name=str(i), time_s=1.0, inputs=(i,), outputs=(i + 1,), output_bytes=100, capture="rows")
        for i in range(3)
    )
    region = plan.PlannedRegion(
        key="r",
        instances=2,
        operators=operators,
        saved=frozenset({1, 2, 3}),
        given=frozenset({0}),
        input_bytes=10**9,
        forward_s=3.0,
        backward_s=6.0,
    )
    budget = plan.Budget(d2h_bytes_per_s=1e3, h2d_bytes_per_s=1e3, host_bytes=10**12, device_bytes=0)
    found = plan.full_recomputation([region], budget)
    assert found.step_s == 2 * (3.0 + 6.0 + 3.0) and found.host_bytes == found.device_bytes == 0


SCRIPT = """
import logging, os, sys, torch, memplug
logging.basicConfig(level=logging.INFO, format=f"rank {{os.environ['RANK']}}: %(message)s", stream=sys.stdout)
from tests.support.blocks import LAYERS, Stack
model = Stack(2)
session = memplug.attach(model, {block!r})
for _ in range(3):
    model(torch.randn(2, 6, 16)).backward()
    session.step()
{end}
"""


GONE = "del session, model; import gc; gc.collect()"


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(
    "end", ["", *(pytest.param(end, marks=pytest.mark.long) for end in ("session.detach()", GONE))]
)
def test_attached_session_logs_its_last_line_as_the_process_ends(end: str, tmp_path: Path) -> None:
    # only the first rank logs the line, once
    config = {**block(regions=LAYERS), "arena": {"enabled": False}, "profiler": {"enabled": False}, "plan_dir": False}
    (tmp_path / "script.py").write_text(SCRIPT.format(block=config, end=end))
    output = launch_forked([tmp_path / "script.py"])
    said = [line for line in output.splitlines() if "after 3 steps" in line]
    assert len(said) == (0 if end == GONE else 1) and all("rank 0: " in line for line in said), output
    assert "Traceback" not in output


def test_last_line_of_an_idle_session_says_why_there_is_no_arena() -> None:
    with memplug.attach(Stack(1), {"enabled": True, "tokenwise": {"enabled": False}}) as session:
        assert closing.line(session._attached) == "after 0 steps; no arena: no step repeated the one before it"
