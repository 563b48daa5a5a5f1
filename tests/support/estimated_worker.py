"""Estimate a plan for a GPU: `python -m tests.support.estimated_worker FOLDER GPU BUDGET_GIB`.

The plan is for `workload()` under that device budget. The GPU has the profile of an H200, under the name `GPU`.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import memplug
from memplug.predict.estimator.shapes import Shape
from memplug.predict.estimator.workload import Workload
from memplug.predict.virtual import GpuProfile

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def workload() -> Workload:
    """Return a Llama whose step takes a hundred MiB."""
    return Workload(shape=Shape(SHAPE), layers=4, seq_len=256, micro_batch=64)


def block(budget_gib: float, plan_dir: Path | bool) -> dict[str, Any]:
    """Return the block for that workload."""
    return {
        "enabled": True,
        "plan_dir": str(plan_dir) if plan_dir is not False else False,
        "device_budget_gib": budget_gib,
        "host_budget_gib": 1,
        "swap": {"enabled": False},
    }


def main() -> None:
    """Write the plan into the folder, and print the estimate."""
    folder, gpu, budget_gib = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    hardware = dataclasses.replace(GpuProfile.named("h200"), name=gpu)
    job = workload()
    found = memplug.estimate(
        job.make_model,
        job.inputs,
        block(budget_gib, False),
        hardware,
        ("memplug",),
        make_optimizer=job.make_optimizer,
        attention="cudnn",
        plan_dir=folder,
    )
    sys.stdout.write(f"{found['memplug']}\n")


if __name__ == "__main__":
    main()
