"""Cases of wrappers, on two processes: DDP and FSDP2."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.clients.loops import watched
from tests.clients.parts import batches, block, llama, run_lines, write_ds

STEPS = 8
Outcome = dict[str, Any]


def wrapped(memplug: bool, title: str) -> Outcome:
    """The lines of a section, each rank on its own batches."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    write_ds(block() if memplug else None)
    model, losses = watched(llama())
    left = run_lines(
        title,
        memplug,
        DistributedDataParallel=nn.parallel.DistributedDataParallel,
        fully_shard=fully_shard,
        AdamW=functools.partial(torch.optim.AdamW, lr=1e-3),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loader=batches(STEPS, seed=1 + dist.get_rank()),
    )
    return {"losses": losses, "model": left["model"]}


def cases() -> Iterator[tuple[str, Callable[..., Outcome]]]:
    """By name."""
    for title in ("DDP", "FSDP2"):
        yield title, functools.partial(wrapped, title=title)
