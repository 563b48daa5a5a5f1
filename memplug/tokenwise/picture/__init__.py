"""What swapping and recomputing say and draw of themselves; knows no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from memplug.figures.figure import Column
from memplug.figures.technique_picture import TechniquePicture
from memplug.figures.words import Rows
from memplug.plans.schema import MemoryPlan
from memplug.tokenwise.picture import bars, block, decisions, diff
from memplug.tokenwise.plan import rules

if TYPE_CHECKING:
    from memplug.block import MemplugConfig


class Picture(TechniquePicture):
    """Shows decisions as bars, a region each."""

    place = 1

    def facts(self, plan: MemoryPlan) -> dict[str, Any]:
        """See `TechniquePicture.facts`."""
        return {"decisions": decisions.decisions(plan)}

    def rows(self, facts: dict[str, Any]) -> Rows:
        """See `TechniquePicture.rows`."""
        return decisions.rows(facts["decisions"]) if facts["decisions"] else []

    def heading(self, plan: MemoryPlan) -> str:
        """See `TechniquePicture.heading`."""
        return "decisions without addresses" if decisions.decisions(plan) else ""

    def column(self, plan: MemoryPlan) -> Column | None:
        """See `TechniquePicture.column`."""
        return bars.column(plan)

    def diff(self, a: MemoryPlan, b: MemoryPlan) -> dict[str, Any]:
        """See `TechniquePicture.diff`."""
        return {"decisions": diff.diff(a, b)}

    def diff_rows(self, facts: dict[str, Any]) -> Rows:
        """See `TechniquePicture.diff_rows`."""
        return diff.rows(facts["decisions"]) if facts["decisions"] else []

    def block_words(self, config: MemplugConfig, *, served: bool) -> list[str]:
        """See `TechniquePicture.block_words`."""
        return block.words(config.tokenwise, served=served)

    def block_warnings(self, config: MemplugConfig, ds_config: Mapping[str, Any]) -> Iterable[str]:
        """See `TechniquePicture.block_warnings`."""
        return block.warnings(config, ds_config)

    def libraries(self) -> Mapping[str, tuple[str, Callable[[], object]]]:
        """See `TechniquePicture.libraries`."""
        return {"planner_rules": ("planner's rules", rules.load)}
