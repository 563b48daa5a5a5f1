"""How all ranks of a run agree: votes, which training does not wait for, and objects. On the CPU, over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

VIRTUAL = "virtual"  # backend of a group whose other ranks are not there (memplug/device/virtual/ranks.py)


class Ranks:
    """Every method is called by all ranks, in the same order."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, or the only process; where no group is there (yet, or any more), as launchers say."""
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        return rank == 0

    @property
    def are_known(self) -> bool:
        """False: a launcher has started several processes, and they have not joined yet."""
        return dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1

    @property
    def rank(self) -> int:
        """Of this process, among those that `gather`."""
        return 0 if self._alone else dist.get_rank()

    @property
    def are_made_up(self) -> bool:
        """The others are not there: what they have is what this one has, in an estimate."""
        return dist.is_initialized() and dist.get_backend() == VIRTUAL

    def vote(self, mask: int) -> Callable[[], int]:
        """Start the bitwise and of a non-negative number over all ranks; returns what waits for the result."""
        return self._reduce(mask, torch.int64, dist.ReduceOp.BAND)

    def least(self, value: float) -> Callable[[], float]:
        """Start the minimum of a number over all ranks; returns what waits for the result."""
        return self._reduce(value, torch.float64, dist.ReduceOp.MIN)

    def _reduce(self, value: Any, dtype: torch.dtype, operation: Any) -> Callable[[], Any]:
        if self._alone:
            return lambda: value
        values = torch.tensor([value], dtype=dtype, device="cpu")
        work = dist.all_reduce(values, operation, self._made_group(), async_op=True)

        def agreed() -> Any:
            work.wait()
            return values.item()

        return agreed

    def gather(self, value: Any) -> list[Any]:
        """What every rank passed, in rank order."""
        if self._alone:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, self._made_group())
        return values

    @property
    def _alone(self) -> bool:
        return not dist.is_initialized() or dist.get_world_size() == 1

    def _made_group(self) -> dist.ProcessGroup:
        """All ranks on a backend that works on the CPU: NCCL would order a vote among the device's own work, and has
        no bitwise and.
        """
        if self._group is None:
            self._group = dist.group.WORLD if _uses_gloo(dist.group.WORLD) else dist.new_group(backend="gloo")
        return self._group


def _uses_gloo(group: dist.ProcessGroup) -> bool:
    """Whether a group has gloo for tensors on the CPU."""
    return "cpu:gloo" in dist.get_backend_config(group).split(",")
