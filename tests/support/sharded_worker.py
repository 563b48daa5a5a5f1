"""Trains blocks under DDP, FSDP2 or torch's context parallelism on this rank, with memplug and without.

Started by a launcher: `torchrun --nproc-per-node N -m tests.support.sharded_worker FOLDER [RING]`. Without RING, the
ways to train are "ddp" and "fsdp2", with RING those of `RINGS`. `FOLDER/RANK.json` gets, for each way and alpha,
whether gradients and losses equal those without memplug, and memplug's report. With RING it also gets, for each way,
whether gradients without memplug equal those of one rank that has whole sequences ("as_whole").
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 4
TOKENS = 16
RINGS = {  # how keys and values are passed on, and whether ranks have equal work
    "allgather": ("allgather", True),
    "alltoall": ("alltoall", True),
    "unbalanced": ("alltoall", False),
}
SHORT_RANK = 1


def shard(way: str, model: nn.Module) -> nn.Module:
    """Return the model, wrapped or sharded for that way of training."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if way == "ddp":
        return DistributedDataParallel(model)
    if way in (*RINGS, "whole"):
        return model
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a gradient as one tensor, gathered from its shards if it has any."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run(way: str, model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Run forward and backward of a step, and return the loss."""
    if way not in (*RINGS, "whole"):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(2, 6, 16))
        loss.backward()
        return loss
    torch.manual_seed(step)
    x = torch.randn(2, TOKENS, 16)  # the same on all ranks: a context splits it among them
    with _context(way, x):
        loss = model(x)
        loss.backward()
    for parameter in model.parameters() if way in RINGS else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return loss


def _context(way: str, x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    if way == "whole":
        return contextlib.nullcontext()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    from tests.support import ring

    ring.enable()
    method, balanced = RINGS[way]
    ring.set_balanced(balanced)
    set_rotate_method(method)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return context_parallel(mesh, buffers=[x], buffer_seq_dims=[1])


def train(way: str, alpha: float | None, rank: int, **fields: Any) -> tuple[list[Any], Any]:
    """Train, and return losses and gradients of each step, and the report; `fields` are fields of memplug's block."""
    import memplug
    from tests.support.blocks import Block, Stack
    from tests.support.hosts import block

    torch.manual_seed(0)
    model = shard(way, Stack(3, Block))
    names = ["module.layers.*"] if way == "ddp" else ["layers.*"]
    settings = {**block(alpha=alpha, regions=names), **fields}
    session = memplug.attach(model, settings) if alpha is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        loss = run(way, model, step, rank)
        found.append([loss.item(), *(whole(p.grad).clone() for p in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.step()
    report = session.report().as_dict() if session is not None else None
    if session is not None:
        session.detach()
    return found, report


def alike(one: Any, other: Any, exact: bool) -> bool:
    """Return whether two losses, or two gradients, are equal: to the bit or within rounding."""
    if not isinstance(one, torch.Tensor):
        return one == other if exact else abs(one - other) < 1e-5
    return torch.equal(one, other) if exact else torch.allclose(one, other, atol=1e-6)


def compare(way: str, name: str, alpha: float, expected: list[Any], rank: int, **fields: Any) -> dict[str, Any]:
    """Train with memplug; return whether losses and gradients are as expected, and the report."""
    found, report = train(way, alpha, rank, **fields)
    same = [
        alike(a, b, alpha != 0.4)
        for ours, theirs in zip(found, expected, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return {f"{way} {name}": {"same": all(same), "compared": len(same), "report": report}}


def run_rings(rank: int) -> dict[str, Any]:
    """Train by all of `RINGS`; in the case "short", one rank has almost no host memory."""
    result: dict[str, Any] = {}
    gradients = [step[1:] for step in train("whole", None, rank)[0]]
    short = {"host_budget_gib": 1e-6 if rank == SHORT_RANK else 1.0}
    for way in RINGS:
        expected, _ = train(way, None, rank)
        right = [
            torch.allclose(a, b, rtol=1e-4, atol=1e-6)
            for ours, theirs in zip(expected, gradients, strict=True)
            for a, b in zip(ours[1:], theirs, strict=True)
        ]
        result[way] = {"as_whole": all(right)}
        for alpha in (0, 0.4, 1):
            result |= compare(way, str(alpha), alpha, expected, rank)
        result |= compare(way, "short", 0, expected, rank, **short)
    return result


def main() -> None:
    """Train in all ways."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if "RING" in sys.argv:
        result = run_rings(rank)
    else:
        result = {}
        for way in ("ddp", "fsdp2"):
            expected, _ = train(way, None, rank)
            for alpha in (0, 0.4, 1):
                result |= compare(way, str(alpha), alpha, expected, rank)
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(result, default=str))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
