"""DeepSpeed on simulated CUDA, one process and two: training with memplug equals training without, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cudasim.forked import ranks_on_cuda
from tests.support.hosts import block

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

SCHEDULES = [("lazy", 0), ("copyfirst", 0), ("computefirst", 0), ("random", 1)]
STEPS_BEFORE = [2, 2, 2, 4]  # a plan is made; ZeRO 3 learns what to fetch, which makes it a program of its own
MICRO_BATCHES = 2
BLOCKS = {"without": None, "0.5": block(alpha=0.5), "auto": block()}
FIELDS = {
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
}


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., str]]:
    """Runs a module on ranks."""
    with ranks_on_cuda("deepspeed") as launch:
        yield launch


def case(
    stage: int, memplug: dict[str, Any] | None, processes: int, schedules: list[tuple[str, int]] = SCHEDULES
) -> dict[str, Any]:
    """A training in which each step has a schedule: some while a plan is made, then these."""
    schedules = SCHEDULES[: STEPS_BEFORE[stage]] + schedules
    zero = {
        "stage": stage,
        "overlap_comm": True,
        "reduce_bucket_size": 5000,
        "allgather_bucket_size": 5000,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 5000,
    }
    return {
        "stage": stage,
        "memplug": memplug,
        "layers": 2,
        "ways": ["keeps nothing"],
        "fields": {**FIELDS, "zero_optimization": zero},
        "lengths": [[12] * MICRO_BATCHES * len(schedules)] * processes,
        "schedules": [schedule for schedule in schedules for _ in range(MICRO_BATCHES)],
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_losses_and_optimizers_are_those_without_memplug_and_nothing_is_unordered(
    processes: int, tmp_path: Path, launch: Callable[..., str]
) -> None:
    every = {
        f"{stage} {name}": case(stage, memplug, processes) for stage in range(4) for name, memplug in BLOCKS.items()
    }
    arguments = ["tests.support.training_worker", tmp_path, json.dumps(every)]
    launch(arguments, processes=processes, module=True, time_limit_s=300)
    for rank in range(processes):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, result in results.items():
            plain = results[f"{every[name]['stage']} without"]
            assert result["losses"] == plain["losses"], name
            assert result["digest"] == plain["digest"], name
            assert result["violations"] == 0, name
            if every[name]["memplug"] is not None:
                report = result["report"]
                assert report["offloaded_bytes"] > 0 and report["recomputed_in_full"] == 0, name
                assert result["stages"][-1] == "stable" and report["arena_served"] > 0, name
