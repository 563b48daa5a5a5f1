"""Trainings with ZeRO on ranks of simulated CUDA, each step under its own schedule."""

from __future__ import annotations

from typing import Any

from tests.support.hosts import block

SCHEDULES = [("lazy", 0), ("copyfirst", 0), ("computefirst", 0), ("random", 1)]
# by ZeRO stage: steps until there is a plan; ZeRO 3 first records which parameters to gather, in another program
STEPS_BEFORE = [2, 2, 2, 4]
MICRO_BATCHES = 2
BLOCKS = {"without": None, "0.5": block(alpha=0.5), "auto": block()}
FIELDS = {
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
}


def case(
    stage: int, memplug: dict[str, Any] | None, processes: int, schedules: list[tuple[str, int]] = SCHEDULES
) -> dict[str, Any]:
    """Return a case for `training_worker` in which each step has its own schedule.

    Steps before there is a plan have schedules of `SCHEDULES`; later ones have `schedules`.
    """
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
