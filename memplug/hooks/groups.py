"""Which ranks of a job train a model: those that were named, those that its wrappers talk to, or all."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memplug.errors import RanksError
from memplug.hooks.framework import Target, instances

Group = Any
"""A process group, or a list of ranks of the world."""


def members_of(target: Target, group: Group | None, found: Sequence[Group]) -> list[int] | None:
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


def may_part(target: Target) -> Callable[[], bool]:
    """Returns whether the model is trained in torch's `join`, by which ranks run out of batches one after the other."""
    joined = [weakref.ref(module) for module in _modules(target) if hasattr(module, "_join_config")]

    def is_joined() -> bool:
        return any(module is not None and module._join_config.enable for module in (one() for one in joined))

    return is_joined


def _named(group: Group) -> list[int]:
    if not dist.is_initialized():
        raise RanksError(
            "`memplug.attach` was given a group, and torch.distributed is not initialized",
            "Call `torch.distributed.init_process_group` before, or leave out `group`.",
        )
    known = range(dist.get_world_size())
    ranks = sorted(set(group if isinstance(group, (list, tuple, range, set)) else _ranks(group)))
    if dist.get_rank() not in ranks or not all(rank in known for rank in ranks):
        raise RanksError(
            f"`memplug.attach` was given the group of ranks {ranks} on rank {dist.get_rank()} of {len(known)}",
            "Attach only on the ranks of the group; it is a process group that this rank is in, or the list of the "
            "ranks that train the model.",
        )
    return ranks


def _groups(target: Target) -> Iterator[Group]:
    for module in _modules(target):
        if isinstance(module, DistributedDataParallel):
            yield module.process_group
    for _, sharded in instances(nn.ModuleList(target.chunks), "torch.distributed.fsdp.FullyShardedDataParallel"):
        yield sharded.process_group
        yield from filter(None, [getattr(sharded, "_inter_node_pg", None)])
    for parameter in target.model.parameters():
        mesh = getattr(parameter, "device_mesh", None)  # a DTensor's: FSDP2, tensor parallelism
        if mesh is not None:
            yield mesh.mesh.flatten().tolist()


def _modules(target: Target) -> set[nn.Module]:
    return set(itertools.chain.from_iterable(chunk.modules() for chunk in (target.model, *target.chunks)))


def _ranks(group: Group) -> list[int]:
    if isinstance(group, list):
        return group
    return [] if isinstance(group, int) else dist.get_process_group_ranks(group)  # an int: of a group of other ranks
