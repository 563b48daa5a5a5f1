"""Decides whether units that communicate (native/units/unit.h) may run again by plan.

Such a unit may run again if all ranks that it communicates with have the same plan: then each of these ranks runs it
again, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from memplug.tokenwise.engine.region import Region


def is_agreed(regions: Sequence[Region], gather: Callable[[Any], list[Any]], members: Sequence[int]) -> bool:
    """Return whether each region with units that communicate ran the same operators on all ranks that they reach.

    A region that ran the same operators on two ranks has the same plan on both. The answer is the same on every rank.

    Args:
        regions: all regions of this rank, each with the key of its operator sequence.
        gather: returns what each rank passed to it, in rank order (`all_gather_object`); all ranks call it together.
        members: world rank of each rank that takes part in `gather`, in the same order. If a unit communicates with any
            other rank, the answer is False.
    """
    sharing = [region for region in regions if region.native.shares]
    everyone = dict(zip(members, gather({region.name: region.key for region in sharing}), strict=True))
    own = all(
        region.partners is not None
        and all(everyone.get(rank, {}).get(region.name) == region.key for rank in region.partners)
        for region in sharing
    )
    return all(gather(own))
