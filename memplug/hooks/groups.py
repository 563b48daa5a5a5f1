"""Finds the ranks that train a model: the group passed to `attach`, the group of the model's wrappers, or all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from memplug.errors import RanksError
from memplug.hooks.framework import AttachTarget, instances
from memplug.hooks.patching import patch
from memplug.session.attached import AttachedModel
from memplug.torch_private import KNOWN

COUNT_OTHERS = "_get_num_nonjoined_procs"  # a rank that is out of batches calls this method repeatedly

Group = Any
"""A process group, or a list of ranks of the world."""


def members_of(target: AttachTarget, group: Group | None, found: Sequence[Group]) -> list[int] | None:
    """Return the global ranks that train a model together; all of them get the same result.

    Without `group`, the result is the largest of the frameworks' groups. If there are none, it is the largest group of
    the model's wrappers and parameters (DistributedDataParallel, FSDP, device meshes). If the largest group does not
    contain all the others, the result is all ranks.

    Args:
        target: the target of `memplug.attach`.
        group: the group that the user passed to `memplug.attach`, or None.
        found: the groups that the frameworks returned (`Framework.groups`).

    Returns:
        The ranks in order; None for all ranks.

    Raises:
        RanksError: `group` does not contain this rank, or torch.distributed is not initialized.
    """
    if group is not None:
        return _named(group)
    if not (dist.is_available() and dist.is_initialized()):
        return None
    ranks = [set(_ranks(one)) for one in (found or _groups(target))]
    largest = max(ranks, key=len, default=set())
    return sorted(largest) if largest and all(one <= largest for one in ranks) else None


def watch_joins(attached: AttachedModel) -> None:
    """Tell the session's `Ranks` when this rank is out of batches and waits in torch's `join`, and when it returns.

    The patch is on torch's class, so it covers wrappers that are made after attaching.
    """
    ranks = weakref.ref(attached.ranks)

    def count_others(original: Callable[[Join], float], join: Join) -> float:
        others, known = original(join), ranks()
        if known is not None and not join._throw_on_early_termination:
            tell = known.part if others else known.rejoin
            tell()
        return others

    # if this torch lacks the method, the other ranks wait for this rank's vote until they time out
    if hasattr(Join, COUNT_OTHERS) and not (attached.ranks.are_known and len(attached.ranks.members) == 1):
        patch(Join, COUNT_OTHERS, count_others, attached, KNOWN)


def _named(group: Group) -> list[int]:
    if not dist.is_initialized():
        raise RanksError(
            "`memplug.attach` was given a group, and torch.distributed is not initialized",
            "Call `torch.distributed.init_process_group` before, or leave out `group`.",
            code="MP004",
        )
    known = range(dist.get_world_size())
    ranks = sorted(set(group if isinstance(group, (list, tuple, range, set)) else _ranks(group)))
    if dist.get_rank() not in ranks or not all(rank in known for rank in ranks):
        raise RanksError(
            f"`memplug.attach` was given the group of ranks {ranks} on rank {dist.get_rank()} of {len(known)}",
            "Attach only on the ranks of the group. Pass a process group that contains this rank, or a list of the "
            "ranks that train the model.",
            code="MP004",
        )
    return ranks


def _groups(target: AttachTarget) -> Iterator[Group]:
    for chunk in (target.model, *target.chunks):
        for module in chunk.modules():
            if isinstance(module, DistributedDataParallel):
                yield module.process_group
    for _, sharded in instances(nn.ModuleList(target.chunks), "torch.distributed.fsdp.FullyShardedDataParallel"):
        yield sharded.process_group
        yield from filter(None, [getattr(sharded, "_inter_node_pg", None)])
    for parameter in target.model.parameters():
        mesh = getattr(parameter, "device_mesh", None)  # a DTensor, of FSDP2 or tensor parallelism
        if mesh is not None:
            yield mesh.mesh.flatten().tolist()


def _ranks(group: Group) -> list[int]:
    if isinstance(group, list):
        return group
    # torch represents a group without this rank by an int
    return [] if isinstance(group, int) else dist.get_process_group_ranks(group)
