"""A memory plan as a figure: a column for each technique that draws its part."""

from __future__ import annotations

from memplug.figures.figure import Figure
from memplug.plans.schema import MemoryPlan
from memplug.show.techniques import in_place


def plan_figure(plan: MemoryPlan) -> Figure:
    """Draw a plan under a title like "Plan of Llama: 9,814 requests in 2.59 GiB, fragmentation 0.00 %, by search"."""
    techniques, model = in_place(), plan.fingerprint.model
    words = next(filter(None, (each.heading(plan) for each in techniques)), "nothing to draw")
    columns = [column for each in techniques if (column := each.column(plan)) is not None]
    return Figure(title=f"Plan{f' of {model}' if model else ''}: {words}", columns=columns)
