"""Decides whether units that communicate (native/units/unit.h) may run again by plan.

They may where all ranks that they communicate with have the same plan: either each of these ranks runs the unit again,
or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from memplug.tokenwise.engine.region import Region


def is_agreed(regions: Sequence[Region], gather: Callable[[Any], list[Any]], members: Sequence[int]) -> bool:
    """Return whether every region with such units ran the same operators on all ranks that these communicate with.

    Regions that did share a plan. The answer is the same on every rank.

    Args:
        regions: all regions, with the keys of their operator sequences.
        gather: returns the arguments of all ranks, in rank order (`all_gather_object`); all ranks call it alike.
        members: numbers of these ranks in the world, in the same order; a unit that communicates with any other rank is
            not agreed.
    """
    sharing = [region for region in regions if region.native.shares]
    everyone = dict(zip(members, gather({region.name: region.key for region in sharing}), strict=True))
    own = all(
        region.partners is not None
        and all(everyone.get(rank, {}).get(region.name) == region.key for rank in region.partners)
        for region in sharing
    )
    return all(gather(own))
