"""Shows the arena's part of a plan, in words and as a map. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memplug.arena.native import packing
from memplug.arena.picture import address_map, diff, summary
from memplug.arena.plan.part import AddressPlan
from memplug.figures.figure import Column
from memplug.figures.technique_picture import TechniquePicture
from memplug.figures.words import Rows
from memplug.plans.schema import MemoryPlan

if TYPE_CHECKING:
    from memplug.block import MemplugConfig


class ArenaPicture(TechniquePicture):
    """The arena's picture: planned addresses as a map."""

    place = 0
    serves = True

    def facts(self, plan: MemoryPlan) -> dict[str, Any]:
        """Return the facts of a plan's addresses; see `TechniquePicture.facts`."""
        return summary.summary(plan)

    def rows(self, facts: dict[str, Any]) -> Rows:
        """Return the result of `facts` as rows of words; see `TechniquePicture.rows`."""
        return summary.rows(facts)

    def heading(self, plan: MemoryPlan) -> str:
        """Return the plan's heading; "" if it has no addresses; see `TechniquePicture.heading`."""
        planned = AddressPlan.of(plan)
        return summary.heading(planned) if planned is not None else ""

    def column(self, plan: MemoryPlan) -> Column | None:
        """Return the map of addresses, if the plan has any; see `TechniquePicture.column`."""
        planned = AddressPlan.of(plan)
        return address_map.column(planned) if planned is not None else None

    def side(self, plan: MemoryPlan) -> dict[str, Any]:
        """Return the facts of one of two plans in a comparison; see `TechniquePicture.side`."""
        return diff.side(plan)

    def diff(self, a: MemoryPlan, b: MemoryPlan) -> dict[str, Any]:
        """Return the differences of two plans; see `TechniquePicture.diff`."""
        return diff.diff(a, b)

    def diff_rows(self, facts: dict[str, Any]) -> Rows:
        """Return the result of `diff` as rows of words; see `TechniquePicture.diff_rows`."""
        return diff.rows(facts)

    def block_words(self, config: MemplugConfig, *, served: bool) -> list[str]:
        """Return lines on the arena's section of the block; see `TechniquePicture.block_words`."""
        arena = config.arena
        if not arena.enabled:
            return ["  the planned arena is switched off (arena.enabled): torch's own allocator serves"]
        checked = ", watching freed memory and margins of blocks for stray writes: slow" if arena.checks else ""
        return [
            f"  arena            training is served at planned addresses (planner {arena.planner}){checked}",
            f"  plans            {f'kept in {config.plan_dir}' if config.plan_dir else 'not kept'}",
        ]

    def libraries(self) -> Mapping[str, tuple[str, Callable[[], object]]]:
        """Return the C++ libraries that planning compiles; see `TechniquePicture.libraries`."""
        return {"address_search": ("address search", packing.load)}


PICTURE = ArenaPicture()
