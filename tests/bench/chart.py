"""Draws the chart of README.md, step time over keep-all on one H200, from tests/data: `python -m tests.bench.chart`.

The SVG is written by hand, not by plotly and Chrome, so that the same rows give the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.folders import DATA, ROOT

CHART = ROOT / "examples" / "step_over_keep_all.svg"
ROWS = DATA / "h200_step_time.json"
EARLIER_ROWS = DATA / "h200.csv"
"""Rows of 26 November 2026, the only ones with selective recomputation of Hugging Face's layers."""

HUGGING_FACE = "Hugging Face"
COLOURS = {"memplug": "#2f81f7", "offload": "#a371f7", "selective": "#d29922", "full": "#8b949e"}
"""Fill of each mode's bars, in the order of the legend and of the bars in a group."""
NAMES = {
    "memplug": "memplug",
    "offload": "Megatron-Core's offloading",
    "selective": "selective recomputation",
    "full": "full recomputation",
}
INK = "#757b85"
"""Text colour with the same contrast, 4.3, on GitHub's white and dark backgrounds."""

WIDTH, HEIGHT = 880, 380
LEFT, RIGHT, TOP, BOTTOM = 52, 870, 66, 314
LOWEST, HIGHEST, TICK = 1.0, 1.4, 0.1
BAR = 29
"""Width of a bar."""
GAP = 2
"""Space between two bars of a group."""
BESIDE = 24
"""Extra space before the groups of Megatron-Core."""


@dataclass(frozen=True)
class Group:
    """The modes measured at one sequence length on one kind of layer.

    Attributes:
        layer: package whose layers ran.
        tokens: tokens of the sequence.
        layers: number of layers.
        over_keep_all: step time over that of keep-all, by mode, in the order of `COLOURS`.
    """

    layer: str
    tokens: int
    layers: int
    over_keep_all: dict[str, float]


def groups() -> list[Group]:
    """Return the chart's groups, left to right, from the rows in tests/data."""
    steps: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in json.loads(ROWS.read_text())["rows"]:
        steps.setdefault((row["layer"], row["tokens"], row["layers"]), {})[row["mode"]] = row["step_s"]
    earlier = _earlier_selective()
    found = []
    for (layer, tokens, layers), step_s in steps.items():
        ratios = {mode: seconds / step_s["keep_all"] for mode, seconds in step_s.items() if mode != "keep_all"}
        if layer == HUGGING_FACE and (tokens, layers) in earlier:
            ratios["selective"] = earlier[tokens, layers]
        found.append(Group(layer, tokens, layers, {mode: ratios[mode] for mode in COLOURS if mode in ratios}))
    return found


def _earlier_selective() -> dict[tuple[int, int], float]:
    """Return selective recomputation over the same day's keep-all, by (tokens, layers), from `EARLIER_ROWS`."""
    steps: dict[tuple[int, int], dict[str, float]] = {}
    with open(EARLIER_ROWS) as file:
        for row in csv.DictReader(file):
            if row["layer"].startswith("HF Llama") and row["use"] == "report":
                steps.setdefault((int(row["tokens"]), int(row["layers"])), {})[row["mode"]] = float(row["step_s"])
    return {
        case: step_s["selective"] / step_s["keep"]
        for case, step_s in steps.items()
        if {"selective", "keep"} <= {*step_s}
    }


def draw(shown: Sequence[Group]) -> str:
    """Return the SVG of these groups; each bar has its mode and figure as attributes."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13" fill="{INK}" role="img">',
        "<title>Step time over keep-all on one H200: memplug beside recomputation and offloading</title>",
        *_legend(),
        *_axis(),
        *_bars(shown),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _legend() -> Iterator[str]:
    yield f'<text x="{LEFT - 40}" y="20" font-size="15" font-weight="600">Step time over keep-all, on one H200</text>'
    x = LEFT - 40
    for mode, colour in COLOURS.items():
        yield f'<rect x="{x}" y="34" width="12" height="12" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="44">{NAMES[mode]}</text>'
        x += 44 + round(6.2 * len(NAMES[mode]))


def _y(ratio: float) -> float:
    return round(BOTTOM - (ratio - LOWEST) / (HIGHEST - LOWEST) * (BOTTOM - TOP), 1)


def _axis() -> Iterator[str]:
    for i in range(round((HIGHEST - LOWEST) / TICK) + 1):
        ratio = LOWEST + i * TICK
        faint = "" if i == 0 else ' stroke-opacity="0.3"'
        yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{_y(ratio)}" y2="{_y(ratio)}" stroke="{INK}"{faint}/>'
        yield f'<text x="{LEFT - 8}" y="{_y(ratio) + 4}" text-anchor="end">{ratio:.1f}</text>'
    yield f'<text x="{LEFT - 8}" y="{BOTTOM + 20}" font-size="12" text-anchor="end">keep-all</text>'


def _bars(shown: Sequence[Group]) -> Iterator[str]:
    """Yield the bars of all groups, with a wider space before those of Megatron-Core."""
    taken = [len(group.over_keep_all) * (BAR + GAP) - GAP for group in shown]
    space = (RIGHT - LEFT - BESIDE - sum(taken)) / len(shown)
    x, before = LEFT + space / 2, HUGGING_FACE
    for group, width in zip(shown, taken, strict=True):
        if before == HUGGING_FACE != group.layer:
            x += BESIDE
        before = group.layer
        centre = round(x + width / 2, 1)
        yield f'<g data-layer="{group.layer}" data-tokens="{group.tokens}" data-layers="{group.layers}">'
        for i, (mode, ratio) in enumerate(group.over_keep_all.items()):
            left, top = round(x + i * (BAR + GAP), 1), _y(ratio)
            yield (
                f'<rect x="{left}" y="{top}" width="{BAR}" height="{round(BOTTOM - top, 1)}" fill="{COLOURS[mode]}" '
                f'data-mode="{mode}" data-over-keep-all="{ratio:.4f}"/>'
            )
            weight = ' font-weight="600"' if mode == "memplug" else ""
            yield (
                f'<text x="{round(left + BAR / 2, 1)}" y="{round(top - 5, 1)}" font-size="12" '
                f'text-anchor="middle"{weight}>{ratio:.2f}</text>'
            )
        tokens, kind = f"{group.tokens:,} tokens", f"{group.layers} layers"
        for below, text in enumerate((tokens, kind, group.layer)):
            yield f'<text x="{centre}" y="{BOTTOM + 22 + 18 * below}" text-anchor="middle">{text}</text>'
        yield "</g>"
        x += width + space


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=CHART, metavar="FILE", help="the SVG (default: %(default)s)")
    return parser.parse_args(argv)


def main() -> None:
    """Write the chart."""
    parse_args().output.write_text(draw(groups()))


if __name__ == "__main__":
    main()
