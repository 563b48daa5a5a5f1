"""The common part of case workers: a rank joins the others, trains in all cases and writes the results."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def run_all(run: Callable[[Any, int], Any]) -> None:
    """Run `run(case, rank)` for each case, write `FOLDER/RANK.json` and end the process.

    The command line is `FOLDER CASES`.
    """
    import deepspeed
    import torch.distributed as dist

    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    # DeepSpeed would first compile a shared-memory all-reduce, which takes half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    rank = int(os.environ["RANK"])
    results = {name: run(case, rank) for name, case in cases.items()}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # DeepSpeed keeps the engines' process groups, whose threads may fail while Python ends


def train_engine(
    engine: Any,
    loss_of: Callable[[int], torch.Tensor],
    micro_batches: int,
    with_memplug: bool,
    short: list[int] | None = None,
    gradients: bool = False,
) -> dict[str, Any]:
    """Train a DeepSpeed engine, and destroy it.

    Args:
        engine: the engine, which counts micro-batches itself and steps when its accumulation is complete.
        loss_of: runs the forward of a micro-batch, by its number.
        micro_batches: number of micro-batches.
        with_memplug: attach memplug, with the engine's own block.
        short: see `run_short`; only for engines that step after each micro-batch.
        gradients: whether to return digests of each micro-batch's gradients.

    Returns:
        "losses": the loss of each micro-batch. "digest": a digest of the weights at the end. "report": memplug's
            report (empty without memplug). "shares": by micro-batch, the share of rows that memplug swapped (empty
            without memplug). "digests": by micro-batch, a digest of all gradients (empty unless `gradients`).
    """
    import memplug

    session = memplug.attach(engine) if with_memplug else None
    losses, digests, shares = [], [], []
    for number in range(micro_batches):
        if short:
            run_short(session, number, short)
        loss = loss_of(number)
        engine.backward(loss)
        digests += [_digest_gradients(engine.module)] if gradients else []
        engine.step()
        losses.append(loss.item())
        shares += [session._attached.executor.flow.share] if session else []
    result = {
        "losses": losses,
        "digest": _digest(engine.module),
        "report": session.report().as_dict() if session else {},
    }
    if session:
        session.detach()
    engine.destroy()
    return {**result, "digests": digests, "shares": shares}


def run_short(session: Any, step: int, short: list[int]) -> None:
    """Limit one rank's pool to half of the host memory that a step takes; called before each step.

    Args:
        session: memplug's session.
        step: the step that begins, from 0.
        short: the rank, and its first step that is short of memory.
    """
    import torch.distributed as dist

    pool = session._attached.executor.pool
    if short[1] == step + 1:
        pool.rows.peak_bytes = 0  # so that the peak is that of this step alone
    if short == [dist.get_rank(), step]:
        pool.close()
        pool.budget_bytes = pool.peak_bytes // 2


def _digest_gradients(module: torch.nn.Module) -> str:
    """Return a digest of all parameters' gradients, between backward and the optimizer."""
    from deepspeed.utils import safe_get_full_grad

    total = hashlib.sha256()
    for parameter in module.parameters():
        total.update(safe_get_full_grad(parameter).numpy().tobytes())
    return total.hexdigest()


def _digest(module: torch.nn.Module) -> str:
    """Return a digest of all parameters, after gathering those that ZeRO 3 has sharded."""
    import deepspeed

    total = hashlib.sha256()
    for parameter in module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            total.update(parameter.detach().float().numpy().tobytes())
    return total.hexdigest()
