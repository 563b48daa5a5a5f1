"""What swapping and recomputing say and draw of themselves; knows no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memplug.figures.figure import Column
from memplug.figures.technique_picture import TechniquePicture
from memplug.figures.words import Rows
from memplug.plans.schema import MemoryPlan
from memplug.tokenwise.picture import bars, decisions, diff

if TYPE_CHECKING:
    from memplug.block import MemplugConfig


class Picture(TechniquePicture):
    """Of decisions: bars."""

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
        tokenwise = config.tokenwise
        if not tokenwise.enabled:
            return ["  row-cached recompute is switched off (tokenwise.enabled): nothing is swapped or recomputed"]
        regions = "every decoder layer" if tokenwise.regions == "auto" else ", ".join(tokenwise.regions)
        moving = f"{tokenwise.buffers} regions' tensors at a time are on their way; memory to prefetch into is "
        reserved = "planned with the arena" if served else "reserved before the first step under a plan"
        return [
            f"  rows swapped     {_alpha_in_words(tokenwise.alpha)}",
            f"  regions          {regions}",
            f"  smallest swap    tensors of {tokenwise.min_offload_bytes:,} bytes",
            f"  buffers          {moving}{reserved}",
        ]


def _alpha_in_words(alpha: float | str) -> str:
    if alpha == "auto":
        return "chosen per tensor from measured rates and the budgets (alpha auto)"
    if alpha == "memo":
        return "one fraction of each captured tensor, as much as each region's forward hides (alpha memo)"
    if alpha == 0:
        return "none: all of each captured tensor is recomputed (alpha 0)"
    if alpha == 1:
        return "all of each captured tensor, nothing expensive is recomputed (alpha 1)"
    return f"the first {alpha:.4g} of each captured tensor's rows, the rest recomputed (alpha {alpha:.4g})"
