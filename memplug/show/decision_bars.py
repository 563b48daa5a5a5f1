"""Decisions as stacked bars, one for each region: what both pictures of a plan draw of them, and the drawing."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memplug.plan.schema import MemoryPlan
from memplug.show.decisions import decisions, region_words, short_region_names
from memplug.show.groups import GRID, INK, Group
from memplug.show.words import axis_unit, duration, size

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from matplotlib.axes import Axes

# No colour of the map's; even in lightness from what the link moves to what nothing is spent on.
_SWAPPED, _KEPT, _PLAIN, _RECOMPUTED = (
    Group("swapped", "#8e2f6f"),
    Group("kept", "#d77fb0"),
    Group("kept, as without memplug", "#f0c9de"),
    Group("recomputed", "#c9c4bb"),
)
_GROUPS = (_SWAPPED, _KEPT, _PLAIN, _RECOMPUTED)
_LABELS_AT_MOST = 40  # of regions along the axis; more would touch
_LETTERS_AT_MOST = 18  # of a label
_ROWS_AT_LEAST = 8
_THICKNESS = 0.8  # of a bar, where 1 leaves no gap
_TITLE = "Decisions by region, and predictions"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Bars:
    """Decisions to look at.

    Attributes:
        names: short, of each region.
        words: what is decided of each, under the pointer.
        groups: the kinds that there are, from the left of each bar.
        amounts: float64[groups, regions], in `unit`.
        unit: of the axis.
        labelled: indices of the regions that have their name at the axis.
        subtitle: what the plan predicts, in lines.
    """

    names: tuple[str, ...]
    words: tuple[str, ...]
    groups: tuple[Group, ...]
    amounts: np.ndarray
    unit: str
    labelled: range
    subtitle: tuple[str, ...]


def bars(plan: MemoryPlan) -> Bars | None:
    """Of one forward of each region; None where the plan has no decisions."""
    facts = decisions(plan)
    if facts is None or not facts["regions"]:
        return None
    regions = facts["regions"]
    table = {group: np.array([_bytes(region, group) for region in regions], np.float64) for group in _GROUPS}
    shown = {group: nbytes for group, nbytes in table.items() if nbytes.any()} or {_SWAPPED: table[_SWAPPED]}
    nbytes = np.stack(list(shown.values()))
    unit, unit_bytes = axis_unit(int(nbytes.sum(axis=0).max()))
    return Bars(
        names=tuple(map(_cut, short_region_names(region["name"] for region in regions))),
        words=tuple(f"{region['name']}: {region_words(region)}" for region in regions),
        groups=tuple(shown),
        amounts=nbytes / unit_bytes,
        unit=unit,
        labelled=range(0, len(regions), -(-len(regions) // _LABELS_AT_MOST)),
        subtitle=_predicted(facts),
    )


def draw(axes: Axes, drawn: Bars) -> None:
    """The bars, the first region on top, with a legend above them; by matplotlib."""
    from matplotlib.patches import Patch

    rows = np.arange(len(drawn.names))
    left = np.zeros(len(rows))
    for group, amounts in zip(drawn.groups, drawn.amounts, strict=True):
        axes.barh(rows, amounts, _THICKNESS, left=left, color=group.colour, linewidth=0)
        left += amounts
    axes.set_ylim(_rows_shown(drawn) - 0.5, -0.5)
    axes.set_xlim(0, _longest(drawn))
    names = [drawn.names[row] for row in drawn.labelled]
    axes.set_yticks(list(drawn.labelled), names, fontsize=8.5, color=INK, parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("region", color=INK)
    axes.set_xlabel(f"bytes of one forward, {drawn.unit}", color=INK)
    axes.set_title("\n".join((_TITLE, *drawn.subtitle)), loc="left", fontsize=9.5, color=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(facecolor=group.colour, label=group.label) for group in drawn.groups]
    axes.figure.legend(handles=patches, loc="outside lower left", ncols=2, frameon=False, fontsize=9.5)


def add(figure: go.Figure, drawn: Bars, left: float) -> None:
    """The bars, as `draw` does, on axes of their own, x5 and y5, from `left` to the right edge; by plotly.

    Args:
        figure: without axes of these names.
        left: share of the figure's width.
    """
    import plotly.graph_objects as go

    rows = np.arange(len(drawn.names))
    words = [html.escape(each) for each in drawn.words]
    base = np.cumsum(drawn.amounts, axis=0) - drawn.amounts
    for group, amounts, begin in zip(drawn.groups, drawn.amounts, base, strict=True):
        figure.add_trace(
            go.Bar(
                orientation="h",
                name=group.label,
                base=begin,
                x=amounts,
                y=rows,
                width=_THICKNESS,
                offset=-_THICKNESS / 2,
                marker={"color": group.colour, "line": {"width": 0}},
                customdata=words,
                hovertemplate="%{customdata}<extra></extra>",
                xaxis="x5",
                yaxis="y5",
                legend="legend2",
            )
        )
    figure.update_layout(
        xaxis5={
            "domain": [left, 1],
            "anchor": "y5",
            "range": [0, _longest(drawn)],
            "title": {"text": f"bytes of one forward, {drawn.unit}"},
            "gridcolor": GRID,
        },
        yaxis5={
            "domain": [0, 0.9],
            "anchor": "x5",
            "range": [_rows_shown(drawn) - 0.5, -0.5],
            "tickvals": list(drawn.labelled),
            "ticktext": [html.escape(drawn.names[row]) for row in drawn.labelled],
            "title": {"text": "region"},
            "showgrid": False,
        },
        legend2={"x": left, "xanchor": "left", "y": 0.905, "yanchor": "bottom", "orientation": "h"},
    )
    figure.add_annotation(
        text="<br>".join(map(html.escape, (_TITLE, *drawn.subtitle))),
        xref="paper",
        yref="paper",
        x=left,
        y=1.0,
        xanchor="left",
        yanchor="bottom",
        align="left",
        showarrow=False,
    )


def _bytes(region: dict[str, Any], group: Group) -> int:
    if group in (_KEPT, _PLAIN):
        return region["kept_bytes"] if region["plain"] == (group is _PLAIN) else 0
    return region[f"{group.label}_bytes"]


def _predicted(facts: dict[str, Any]) -> tuple[str, str]:
    full_s, peak_bytes = facts["full_recomputation_s"], facts["peak_bytes"]
    return (
        f"step {duration(facts['step_s'])}"
        + (f", full recomputation {duration(full_s)}" if full_s is not None else ""),
        (f"peak {size(peak_bytes)}, " if peak_bytes is not None else "") + f"host memory {size(facts['host_bytes'])}",
    )


def _cut(name: str) -> str:
    """A name that leaves room for its bar."""
    return name if len(name) <= _LETTERS_AT_MOST else "…" + name[1 - _LETTERS_AT_MOST :]


def _rows_shown(drawn: Bars) -> int:
    """More than there are, where a few would be as thick as walls."""
    return max(len(drawn.names), _ROWS_AT_LEAST)


def _longest(drawn: Bars) -> float:
    return 1.04 * float(drawn.amounts.sum(axis=0).max()) or 1.0
