"""Train a tiny Llama as a rank of DeepSpeed on the virtual device, by plans of each kind, and write its steps.

    python -m tests.support.zero_programs_worker FOLDER STAGE RANKS KIND...

`FOLDER/STAGE-RANKS.json` gets kind -> {"steps": for each step [digest of its operators, number of operators, number of
autograd nodes, number of regions that run as without memplug, whether it is planned], "arena_reserved_bytes": null if
no arena served}.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from memplug.config import load_config
from memplug.predict.estimator.engine import EngineTraining, rank_of, settings_of
from memplug.predict.estimator.estimate import estimate_training
from memplug.predict.estimator.request import EstimateRequest
from memplug.predict.estimator.shapes import Shape, needed
from memplug.predict.estimator.workload import Workload
from memplug.predict.virtual import GpuProfile, VirtualDevice
from memplug.profile.similarity import Program
from memplug.session.adjuster import Adjuster
from memplug.tokenwise import candidates
from memplug.tokenwise.plan import plain
from memplug.tokenwise.plan import solver as tokenwise

LAYERS = 4
HARDWARE = GpuProfile.named("h200")
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
Regions = Sequence[tokenwise.PlannedRegion]


def kept(regions: Regions, budget: tokenwise.Budget) -> tokenwise.TokenwisePlan | None:
    """Return a plan that keeps everything: every region runs as without memplug."""
    return plain.solve(regions, replace(budget, device_bytes=1 << 40))


def swapped(regions: Regions, budget: tokenwise.Budget) -> tokenwise.TokenwisePlan | None:
    """Return a plan that swaps all rows."""
    return tokenwise.solve(regions, budget, 1.0)


def recomputed(regions: Regions, budget: tokenwise.Budget) -> tokenwise.TokenwisePlan | None:
    """Return a plan that recomputes all rows."""
    return tokenwise.solve(regions, budget, 0.0)


def mixed(regions: Regions, budget: tokenwise.Budget) -> tokenwise.TokenwisePlan | None:
    """Return a plan under which the last two regions run as without memplug."""
    room_bytes = sum((2 + region.staying) * region.saved_bytes for region in regions)
    return plain.solve_partly(regions, replace(budget, device_bytes=room_bytes))


KINDS = {each.__name__: each for each in (kept, swapped, recomputed, mixed)}


def trained(kind: str, stage: int, ranks: int) -> dict[str, Any]:
    """Train under a plan of that kind; return the facts on each step's operators, and the arena's reserved bytes."""
    steps: list[list[Any]] = []

    def end_step(original: Callable[..., None], adjuster: Adjuster, step: int, program: Program) -> None:
        planned = adjuster.decisions is not None
        original(adjuster, step, program)
        if program.operators is not None:
            digest = hashlib.sha256(program.operators.tobytes()).hexdigest()[:12]
            steps.append([digest, len(program.operators), program.nodes, len(program.unseen), planned])

    def choose(task: candidates.SolveTask, solved: Any, gather: Any) -> list[tokenwise.TokenwisePlan]:
        return [KINDS[kind](task.regions, task.budget.with_buffers(task.regions))]

    original = Adjuster.end_step
    workload = Workload(shape=Shape(SHAPE), layers=LAYERS, seq_len=64, micro_batch=1, dtype="bf16", head=True)
    settings = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if stage == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    block = load_config({"enabled": True, "tokenwise": {"min_offload_bytes": 1}})
    with (
        mock.patch.object(Adjuster, "end_step", lambda *given: end_step(original, *given)),
        mock.patch.object(candidates, "choose", choose),
    ):
        train = functools.partial(EngineTraining, workload.make_model, workload.inputs, settings_of(settings, 1, ranks))
        found = estimate_training(train, EstimateRequest.of(block, HARDWARE, ("memplug",)))["memplug"]
    return {"steps": steps, "arena_reserved_bytes": found.arena_reserved_bytes}


def main() -> None:
    """Run the kinds of plans of the command line."""
    folder, stage, ranks, *kinds = sys.argv[1:]
    needed("transformers.models.llama.modeling_llama")  # imported before ZeRO 3 replaces functions that make tensors
    VirtualDevice(HARDWARE)  # the ranks' device
    with rank_of(int(ranks)):
        found = {kind: trained(kind, int(stage), int(ranks)) for kind in kinds}
    (Path(folder) / f"{stage}-{ranks}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
