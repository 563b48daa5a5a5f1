"""Under DeepSpeed, a plan changes ZeRO's work around regions, but not the program.

Each step runs the same operators of the model under any plan, and on any number of ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forking import launch_forked

WORKER = "tests.support.zero_programs_worker"
KINDS = ("kept", "swapped", "recomputed", "mixed")
PLAIN = {"kept": 3, "swapped": 0, "recomputed": 0, "mixed": 2}
"""How many of four regions have their modules' own class back: not the first of a kind, which checks its inputs."""
SOME = [(2, 8), (3, 64)]
REST = [(0, 2), (1, 64), (2, 4096), (3, 2), (3, 4096)]


@pytest.mark.parametrize(("stage", "ranks"), [*SOME, *(pytest.param(*pair, marks=pytest.mark.long) for pair in REST)])
def test_putting_a_plan_into_force_does_not_change_the_program(stage: int, ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    kinds = KINDS if ranks < 64 else ("kept", "mixed")
    launch_forked([WORKER, tmp_path, str(stage), str(ranks), *kinds], processes=1, module=True)
    for kind, found in json.loads((tmp_path / f"{stage}-{ranks}.json").read_text()).items():
        steps = found["steps"]
        planned = [step for step in steps if step[-1]]
        assert planned and len(planned) < len(steps), kind
        assert steps == steps[: len(steps) - len(planned)] + planned, "the plan stays in force"
        assert {unseen for *_, unseen, _ in planned} == {PLAIN[kind]}, kind
        assert len({tuple(step[:3]) for step in steps}) == 1, (kind, steps)
        assert found["arena_reserved_bytes"], "the arena serves kept buffers"


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_program_is_independent_of_the_number_of_ranks(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    found = set()
    for ranks in (2, 512):
        launch_forked([WORKER, tmp_path, str(stage), str(ranks), "kept"], processes=1, module=True)
        steps = json.loads((tmp_path / f"{stage}-{ranks}.json").read_text())["kept"]["steps"]
        found |= {tuple(step[:3]) for step in steps}
    assert len(found) == 1
