"""Which ranks of a job train a model: those that were named, those that its wrappers talk to, or all."""

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

COUNT_OTHERS = "_get_num_nonjoined_procs"  # method that a rank calls again and again where it has no more batches

Group = Any
"""A process group, or a list of ranks of the world."""


def members_of(target: AttachTarget, group: Group | None, found: Sequence[Group]) -> list[int] | None:
    """Ranks of the world that train a model together, the same list on each of them; None: all there are.

    Without a group they are those of the largest one that the model's wrappers and parameters have, if it has all that
    the smaller ones have: DistributedDataParallel's, FSDP's, a device mesh's.

    Args:
        group: that the user named.
        found: that a framework names.

    Raises:
        RanksError: this rank is not in the group that was named, or there are no groups yet.
    """
    if group is not None:
        return _named(group)
    if not (dist.is_available() and dist.is_initialized()):
        return None
    ranks = [set(_ranks(one)) for one in (found or _groups(target))]
    largest = max(ranks, key=len, default=set())
    return sorted(largest) if largest and all(one <= largest for one in ranks) else None


def watch_joins(attached: AttachedModel) -> None:
    """Have the session's ranks know while this one has no more batches in torch's `join`, whichever wrapper of the
    model, made before or after it was attached, has others that go on.
    """
    ranks = weakref.ref(attached.ranks)

    def count_others(original: Callable[[Join], float], join: Join) -> float:
        others, known = original(join), ranks()
        if known is not None and not join._throw_on_early_termination:
            tell = known.part if others else known.rejoin
            tell()
        return others

    # a torch without it: the others wait for this rank as for any that ends no steps
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
            "Attach only on the ranks of the group; it is a process group that this rank is in, or the list of the "
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
        mesh = getattr(parameter, "device_mesh", None)  # a DTensor's: FSDP2, tensor parallelism
        if mesh is not None:
            yield mesh.mesh.flatten().tolist()


def _ranks(group: Group) -> list[int]:
    if isinstance(group, list):
        return group
    return [] if isinstance(group, int) else dist.get_process_group_ranks(group)  # an int: of a group of other ranks
