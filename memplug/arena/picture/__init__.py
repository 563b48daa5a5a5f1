"""What the arena says and draws of itself; knows no torch."""

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


class Picture(TechniquePicture):
    """Shows planned addresses as a map."""

    place = 0
    serves = True

    def facts(self, plan: MemoryPlan) -> dict[str, Any]:
        """See `TechniquePicture.facts`."""
        return summary.summary(plan)

    def rows(self, facts: dict[str, Any]) -> Rows:
        """See `TechniquePicture.rows`."""
        return summary.rows(facts)

    def heading(self, plan: MemoryPlan) -> str:
        """See `TechniquePicture.heading`."""
        planned = AddressPlan.of(plan)
        return summary.heading(planned) if planned is not None else ""

    def column(self, plan: MemoryPlan) -> Column | None:
        """See `TechniquePicture.column`."""
        planned = AddressPlan.of(plan)
        return address_map.column(planned) if planned is not None else None

    def side(self, plan: MemoryPlan) -> dict[str, Any]:
        """See `TechniquePicture.side`."""
        return diff.side(plan)

    def diff(self, a: MemoryPlan, b: MemoryPlan) -> dict[str, Any]:
        """See `TechniquePicture.diff`."""
        return diff.diff(a, b)

    def diff_rows(self, facts: dict[str, Any]) -> Rows:
        """See `TechniquePicture.diff_rows`."""
        return diff.rows(facts)

    def block_words(self, config: MemplugConfig, *, served: bool) -> list[str]:
        """See `TechniquePicture.block_words`."""
        arena = config.arena
        if not arena.enabled:
            return ["  the planned arena is switched off (arena.enabled): torch's own allocator serves"]
        checked = ", with freed memory and what surrounds each block looked after: slow" if arena.checks else ""
        return [
            f"  arena            training is served at planned addresses (planner {arena.planner}){checked}",
            f"  plans            {f'kept in {config.plan_dir}' if config.plan_dir else 'not kept'}",
        ]

    def libraries(self) -> Mapping[str, tuple[str, Callable[[], object]]]:
        """See `TechniquePicture.libraries`."""
        return {"address_search": ("address search", packing.load)}
