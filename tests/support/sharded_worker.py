"""Trains a stack of blocks under DDP or FSDP2 on this rank, with memplug and without, and compares the two.

Started by a launcher: `torchrun --nproc-per-node 2 -m tests.support.sharded_worker FOLDER`. `FOLDER/RANK.json` gets, by
way and alpha, whether gradients and losses are alike, and memplug's counters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 4


def shard(way: str, model: nn.Module) -> nn.Module:
    """The model as that way of training wants it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if way == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient without its shards."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(way: str, alpha: float | None, rank: int) -> tuple[list[Any], Any]:
    """Losses and gradients of each step; the report."""
    import memplug
    from tests.support.blocks import Block, Stack
    from tests.support.hosts import block

    torch.manual_seed(0)
    model = shard(way, Stack(3, Block))
    names = ["module.layers.*"] if way == "ddp" else ["layers.*"]
    session = memplug.attach(model, block(alpha=alpha, regions=names)) if alpha is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(2, 6, 16))
        loss.backward()
        found.append([loss.item(), *(whole(p.grad).clone() for p in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.step()
    report = session.report() if session is not None else None
    if session is not None:
        session.detach()
    return found, report


def alike(one: Any, other: Any, exact: bool) -> bool:
    """Whether two steps are, to the bit or within rounding."""
    if not isinstance(one, torch.Tensor):
        return one == other if exact else abs(one - other) < 1e-5
    return torch.equal(one, other) if exact else torch.allclose(one, other, atol=1e-6)


def main() -> None:
    """Trains in all ways."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result = {}
    for way in ("ddp", "fsdp2"):
        expected, _ = train(way, None, rank)
        for alpha in (0, 0.4, 1):
            found, report = train(way, alpha, rank)
            same = [
                alike(a, b, alpha != 0.4)
                for ours, theirs in zip(found, expected, strict=True)
                for a, b in zip(ours, theirs, strict=True)
            ]
            result[f"{way} {alpha}"] = {"same": all(same), "compared": len(same), "report": report}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(result, default=str))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
