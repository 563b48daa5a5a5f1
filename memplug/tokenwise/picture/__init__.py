"""The texts and drawings of tokenwise, for its part of a plan and its section of the block; imports no torch."""

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


class TokenwisePicture(TechniquePicture):
    """Shows decisions in words, and as one bar per region."""

    place = 1

    def facts(self, plan: MemoryPlan) -> dict[str, Any]:
        """Return the decisions of a plan as plain values: see `TechniquePicture.facts`."""
        return {"decisions": decisions.decisions(plan)}

    def rows(self, facts: dict[str, Any]) -> Rows:
        """Return the decisions in words: see `TechniquePicture.rows`."""
        return decisions.rows(facts["decisions"]) if facts["decisions"] else []

    def heading(self, plan: MemoryPlan) -> str:
        """Return a heading for plans with decisions: see `TechniquePicture.heading`."""
        return "decisions without addresses" if decisions.decisions(plan) else ""

    def column(self, plan: MemoryPlan) -> Column | None:
        """Return the decisions as bars: see `TechniquePicture.column`."""
        return bars.column(plan)

    def diff(self, a: MemoryPlan, b: MemoryPlan) -> dict[str, Any]:
        """Return the differences between the decisions of two plans: see `TechniquePicture.diff`."""
        return {"decisions": diff.diff(a, b)}

    def diff_rows(self, facts: dict[str, Any]) -> Rows:
        """Return the result of `diff` in words: see `TechniquePicture.diff_rows`."""
        return diff.rows(facts["decisions"]) if facts["decisions"] else []

    def block_words(self, config: MemplugConfig, *, served: bool) -> list[str]:
        """Return the settings of the section in words: see `TechniquePicture.block_words`."""
        return block.words(config.tokenwise, served=served)

    def block_warnings(self, config: MemplugConfig, ds_config: Mapping[str, Any]) -> Iterable[str]:
        """Return warnings about DeepSpeed's settings: see `TechniquePicture.block_warnings`."""
        return block.warnings(config, ds_config)

    def libraries(self) -> Mapping[str, tuple[str, Callable[[], object]]]:
        """Return the library of the planner's rules: see `TechniquePicture.libraries`."""
        return {"planner_rules": ("planner's rules", rules.load)}


PICTURE = TokenwisePicture()
