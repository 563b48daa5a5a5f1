"""Charts of a step on the virtual device, from made-up spans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplug.predict.estimator.result import Span
from memplug.profile.operator_names import CONVOLUTION, MATMULS
from memplug.show.gantt import BARS, TRACKS, bars_of, gantt, write_chrome
from memplug.show.page import write_page
from memplug.show.picture import write_picture

STEP = [
    Span(0, 0.0, 0.2, 0.0, "aten::mm"),
    Span(0, 0.2, 0.3, 0.00001, "aten::addmm"),
    Span(0, 0.3, 0.5, 0.00002, "attention_forward"),
    Span(1, 0.3, 0.8, 0.00003, "to host"),
    Span(2, 0.6, 0.7, 0.4, "to device"),
    Span(0, 0.7, 1.0, 0.40001, "aten::add"),
]


def test_adjacent_spans_of_one_kind_merge_into_one_bar() -> None:
    bars = {(bar.track, bar.kind, bar.begin_s, bar.end_s, bar.count) for bar in bars_of(STEP, 1.0)}
    assert bars == {
        ("compute", "matrix product", 0.0, 0.3, 2),
        ("compute", "attention", 0.3, 0.5, 1),
        ("compute", "other kernels", 0.7, 1.0, 1),
        ("offload", "offload", 0.3, 0.8, 1),
        ("prefetch", "prefetch", 0.6, 0.7, 1),
        ("host", "host", 0.0, 0.00003, 4),
        ("host", "host", 0.4, 0.40001, 2),
    }


@pytest.mark.parametrize("name", [*MATMULS, CONVOLUTION])
def test_every_matmul_operator_is_drawn_as_matrix_product(name: str) -> None:
    (bar,) = [bar for bar in bars_of([Span(0, 0.0, 1.0, 0.0, name)], 1.0) if bar.track == "compute"]
    assert bar.kind == "matrix product"


def test_long_step_has_a_limited_number_of_bars() -> None:
    spans = [Span(0, at * 1e-4, at * 1e-4 + 0.9e-4, 0.0, "aten::add") for at in range(100_000)]
    assert len([bar for bar in bars_of(spans, 10.0) if bar.track == "compute"]) <= BARS


@pytest.mark.parametrize("long_s", [1.0, 40.0])
def test_figure_has_one_panel_per_step_on_one_clock(long_s: float, tmp_path: Path) -> None:
    figure = gantt("a title", {"keep": (1.0, STEP), "memplug": (long_s, STEP)})
    (column,) = figure.columns
    assert len(column.panels) == 2 and set(column.panels[0].y.ticks) == set(range(len(TRACKS)))
    assert column.x.high == (40.0 if long_s == 40 else 1000.0)
    assert column.x.title == ("seconds" if long_s == 40 else "milliseconds")
    pytest.importorskip("plotly")
    write_page(figure, tmp_path / "chart.html")
    page = (tmp_path / "chart.html").read_text()
    assert "matrix product" in page and "copies to host: 1 in" in page and "the host queues: 4 in" in page


def test_figure_is_written_as_png(chrome: None, tmp_path: Path) -> None:
    write_picture(gantt("a title", {"keep": (1.0, STEP), "memplug": (40.0, STEP)}), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 5_000


def test_chrome_trace_has_every_span_in_microseconds(tmp_path: Path) -> None:
    write_chrome({"keep": (1.0, STEP), "full": (1.0, STEP[:1])}, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 7 and [event["pid"] for event in spans] == [1] * 6 + [2]
    copy = next(event for event in spans if event["name"] == "to device")
    assert (copy["ts"], copy["dur"], copy["args"]["queued_us"]) == (600_000, 100_000, 400_000)
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[copy["pid"], copy["tid"]] == "prefetch"
