"""Decides whether a plan may let units that communicate run again (native/units/unit.h).

A plan may do so if all ranks that the unit communicates with have the same plan: then all of these ranks run the unit
again, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from memplug.tokenwise.engine.region import Region


def is_agreed(regions: Sequence[Region], gather: Callable[[Any], list[Any]], members: Sequence[int]) -> bool:
    """Return whether ranks that communicate through a unit ran the same operators in the unit's region.

    Two ranks that ran the same operators in a region have the same plan for it. The answer is the same on every rank.

    Args:
        regions: all regions of this rank, each with the key of its operator sequence.
        gather: collective that returns the arguments of all ranks, in rank order (`all_gather_object`).
        members: world rank of each rank that calls `gather`, in the order of `gather`'s results. If a unit communicates
            with any other rank, the answer is False.
    """
    sharing = [region for region in regions if region.native.shares]
    everyone = dict(zip(members, gather({region.name: region.key for region in sharing}), strict=True))
    own = all(
        region.partners is not None
        and all(everyone.get(rank, {}).get(region.name) == region.key for rank in region.partners)
        for region in sharing
    )
    return all(gather(own))
