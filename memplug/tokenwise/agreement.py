"""Units that communicate (native/units/unit.h) may run again by plan where all ranks that they talk to have the same
plan: each of them then runs the unit again, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from memplug.tokenwise.engine.region import Region


def is_agreed(regions: Sequence[Region], gather: Callable[[Any], list[Any]], members: Sequence[int]) -> bool:
    """Whether every region with such units ran the same operators on all ranks that these talk to: regions that did
    share a plan. The same answer on every rank.

    Args:
        regions: with the keys of their operator sequences.
        gather: returns what every rank passed, in rank order (`all_gather_object`); called by all ranks alike.
        members: ranks of the world that gather, in that order; with any other, nothing is agreed.
    """
    sharing = [region for region in regions if region.native.shares]
    everyone = dict(zip(members, gather({region.name: region.key for region in sharing}), strict=True))
    own = all(
        region.partners is not None
        and all(everyone.get(rank, {}).get(region.name) == region.key for rank in region.partners)
        for region in sharing
    )
    return all(gather(own))
