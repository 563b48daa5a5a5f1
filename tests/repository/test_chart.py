"""The chart shows the rows in tests/data; README.md and tests/bench/README.md state the same figures."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from tests.bench.chart import CHART, COLOURS, HUGGING_FACE, ROWS, Group, draw, groups
from tests.support.folders import ROOT

FIGURES = (ROOT / "tests/bench/README.md").read_text()
LANDING = (ROOT / "README.md").read_text()


def rows() -> list[dict[str, str | int | float]]:
    """Return the rows of 27 November as tests/data has them."""
    return json.loads(ROWS.read_text())["rows"]


def over_full(amount: str) -> list[float]:
    """Return memplug's memory over that of full recomputation, for each case that has both."""
    found = {(row["layer"], row["tokens"], row["mode"]): row[amount] for row in rows() if amount in row}
    cases = [(layer, tokens) for layer, tokens, mode in found if mode == "memplug" and (layer, tokens, "full") in found]
    return [found[(*case, "memplug")] / found[(*case, "full")] for case in cases]


def test_committed_chart_is_drawn_from_the_measured_rows() -> None:
    assert CHART.read_text() == draw(groups()), "run `python -m tests.bench.chart`"


def test_bar_heights_match_their_figures() -> None:
    name = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in ElementTree.parse(CHART).iter(f"{name}rect") if "data-mode" in bar.attrib]
    shown = [ratio for group in groups() for ratio in group.over_keep_all.values()]
    assert [float(bar.attrib["data-over-keep-all"]) for bar in bars] == pytest.approx(shown, abs=5e-5)
    heights = [float(bar.attrib["height"]) / (ratio - 1) for bar, ratio in zip(bars, shown, strict=True)]
    assert heights == pytest.approx([heights[0]] * len(bars), rel=0.02)


def test_changed_row_changes_the_chart() -> None:
    first, *others = groups()
    changed = Group(first.layer, first.tokens, first.layers, {**first.over_keep_all, "memplug": 1.2})
    assert draw([changed, *others]) != CHART.read_text()


def test_every_mode_of_the_legend_is_drawn() -> None:
    assert {mode for group in groups() for mode in group.over_keep_all} == set(COLOURS)


@pytest.mark.parametrize("group", groups(), ids=lambda group: f"{group.layer}, {group.tokens}")
def test_table_of_figures_has_times_and_ratios_of_the_measured_rows(group: Group) -> None:
    titles = {
        HUGGING_FACE: f"| {group.tokens:,} × {group.layers} |",
        "Transformer Engine": "| Transformer Engine's | s |",
        "Megatron-Core local": "| local | s |",
    }
    line = next(line for line in FIGURES.splitlines() if line.startswith(titles[group.layer]))
    measured = [row for row in rows() if (row["layer"], row["tokens"]) == (group.layer, group.tokens)]
    for row in measured:
        ratio = group.over_keep_all.get(row["mode"])
        assert f"| {row['step_s']:.3f}{'' if ratio is None else f' ({ratio:.2f})'} |" in line, (row, line)
    if group.layer == HUGGING_FACE:
        peaks = [row["peak_gb"] for row in measured]
        reserved = [row["reserved_gb"] for row in measured if "reserved_gb" in row]
        assert f"| {', '.join(map(str, peaks))} | {', '.join(map(str, reserved))} |" in line
        if "selective" in group.over_keep_all:
            assert f"| ({group.over_keep_all['selective']:.2f}) |" in line


def test_readme_states_the_ranges_of_the_measured_rows() -> None:
    percent = {
        mode: [100 * (group.over_keep_all[mode] - 1) for group in groups() if mode in group.over_keep_all]
        for mode in COLOURS
    }
    text = " ".join(LANDING.split())
    stated = re.search(
        r"(\d+) to (\d+) % longer than with all activations kept; full recomputation takes (\d+) to (\d+) % longer",
        text,
    )
    assert [int(figure) for figure in stated.groups()] == [
        round(edge(percent[mode])) for mode in ("memplug", "full") for edge in (min, max)
    ]
    stated = re.search(
        r"relative to full recomputation, memplug peaks at ([\d.]+) to ([\d.]+) and reserves ([\d.]+) to ([\d.]+)\.",
        text,
    )
    assert [float(figure) for figure in stated.groups()] == [
        round(edge(over_full(amount)), 2) for amount in ("peak_gb", "reserved_gb") for edge in (min, max)
    ]
