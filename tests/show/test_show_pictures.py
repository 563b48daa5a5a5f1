"""The page and the picture of `memplug show`, read back: plotly's data, and pixels."""

from __future__ import annotations

import base64
import json
import re
import sys
from html import unescape

import numpy as np
import pytest

from memplug.errors import MemplugError
from memplug.profile.trace_file import load
from memplug.show.page import write_page
from memplug.show.picture import write_picture
from memplug.show.timeline import timeline
from memplug.show.trace_figure import trace_figure
from tests.support.pictures import pixels_of
from tests.support.show_traces import MIB, odd_trace, training_trace
from tests.support.traces import LEGACY, Recording


class Page:
    """The data that the script of a page gives to plotly."""

    def __init__(self, path) -> None:
        self.text = path.read_text(encoding="utf-8")
        start = self.text.index("[", self.text.rindex("Plotly.newPlot("))
        self.data, end = json.JSONDecoder().raw_decode(self.text, start)
        self.layout, _ = json.JSONDecoder().raw_decode(self.text, self.text.index("{", end))

    def named(self, **properties) -> list[dict]:
        return [each for each in self.data if properties.items() <= each.items()]


def numbers(values) -> np.ndarray:
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
    return np.array(values)


@pytest.fixture
def page(tmp_path):
    def write(trace) -> Page:
        write_page(trace_figure(trace), tmp_path / "page.html")
        return Page(tmp_path / "page.html")

    return write


def test_page_is_self_contained_and_deterministic(page):
    text = page(training_trace()).text
    assert page(training_trace()).text == text
    outside_of_scripts = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.search(r"\bsrc\s*=|\bhref\s*=|@import|url\(", outside_of_scripts)
    assert not re.search(r"<script[^>]*\ssrc\s*=", text)
    assert len(text) > 4_000_000, "plotly is inside"


@pytest.mark.parametrize("trace", [training_trace(layers=12, steps=2), load(LEGACY[0]), odd_trace()])
def test_page_has_memory_in_use_in_both_views_and_the_exact_peak(page, trace):
    written, line = page(trace), timeline(trace)
    (total,) = written.named(name="in use")
    unit_bytes = {"GiB": 2**30, "MiB": MIB, "KiB": 2**10}[written.layout["yaxis"]["title"]["text"].split()[-1]]
    assert (numbers(total["x"]) == line.at).all()
    # Division by a power of two is exact.
    assert (numbers(total["y"]) * unit_bytes == line.in_use_bytes).all()
    for stack, groups in (("phase", line.phases.groups), ("layer", line.layers.groups)):
        bands = written.named(stackgroup=stack)
        assert (sum(numbers(band["y"]) for band in bands) * unit_bytes == line.in_use_bytes).all()
        assert {unescape(band["name"]): band["fillcolor"] for band in bands}.items() <= {
            g.label: g.colour for g in groups
        }.items()
        assert all(band["line"]["shape"] == "hv" and (numbers(band["x"]) == line.at).all() for band in bands)
    event, peak_bytes = trace.replayed_peak()
    (mark,) = written.layout["annotations"]
    assert mark["y"] * unit_bytes == peak_bytes and mark["x"] == line.at[line.event == event][0]
    assert mark["text"].startswith("peak ")


def test_page_switches_between_views_and_has_titles(page):
    trace = training_trace()
    written = page(trace)
    by_phase, by_layer = written.layout["updatemenus"][0]["buttons"]
    assert (by_phase["label"], by_layer["label"]) == ("by phase", "by layer")
    for button, shown, hidden in ((by_phase, "phase", "layer"), (by_layer, "layer", "phase")):
        visible = dict(zip(map(id, written.data), button["args"][0]["visible"], strict=True))
        assert all(visible[id(band)] for band in written.named(stackgroup=shown))
        assert not any(visible[id(band)] for band in written.named(stackgroup=hidden))
        assert all(visible[id(each)] for each in written.data if "stackgroup" not in each)
    assert [band["visible"] for band in written.named(stackgroup="layer")] == [False] * 6
    assert "Stack, 1 recorded step, NVIDIA H200, rank 3 of 8" in written.layout["title"]["text"]
    assert written.layout["xaxis3"]["title"]["text"] == "operator, running number"
    assert written.layout["yaxis"]["title"]["text"] == "memory in use, MiB"


def test_hover_text_names_operator_and_memory_in_use(page):
    trace = training_trace()
    (total,) = page(trace).named(name="in use")
    line = timeline(trace)
    peak = f"backward of micro-batch 1, model.layers.3, aten::mm (operator {1 + 3 * 4 * 5:,})"
    assert total["customdata"][line.peak] == peak
    assert total["hovertemplate"].startswith("<b>%{y:.3f} MiB</b>")


def test_page_has_phases_and_layers_along_the_axis(page):
    trace = training_trace(layers=3, micro_batches=2)
    phases, layers = page(trace).named(type="bar")
    assert phases["text"] == ["", "F0", "B0", "F1", "B1", "opt"]
    starts, lengths = numbers(phases["base"]), numbers(phases["x"])
    assert (starts[1:] == (starts + lengths)[:-1]).all() and starts[0] == 0
    assert (starts + lengths)[-1] == len(trace.operators)
    assert layers["text"] == ["0", "1", "2", "2", "1", "0"] * 2
    assert layers["customdata"][2] == "model.layers.2 (dynamic): from operator 11 up to 16"


def test_page_of_300_000_events_stays_small_and_keeps_the_peak(page):
    trace = training_trace(layers=80, micro_batches=8, steps=16)
    assert len(trace.events) > 300_000
    written = page(trace)
    assert len(written.text.encode()) < 8_000_000
    (total,) = written.named(name="in use")
    assert numbers(total["y"]).max() * 2**30 == trace.peak_bytes
    assert len(written.layout["shapes"]) == 15, "steps, not 16 × 17 phases"


def test_markup_in_names_cannot_break_the_page(page):
    written = page(odd_trace())
    assert "</script><b>" not in written.text
    title = re.search("<title>(.*?)</title>", written.text).group(1)
    assert "<" not in title and unescape(title) == "Memory in use: <Model>$"
    shown = [*written.named(name="in use")[0]["customdata"], written.layout["annotations"][0]["text"]]
    assert not any("<" in text for text in shown)


@pytest.fixture
def pixels(chrome, tmp_path):
    """Return a function that draws a trace as uint8[height, width, 3]."""

    def write(trace) -> np.ndarray:
        image = pixels_of(trace_figure(trace), tmp_path / "picture.png")
        assert image.shape == (1045, 1650, 3)
        return image

    return write


def colour(text: str) -> list[int]:
    return [int(text[i : i + 2], 16) for i in (1, 3, 5)]


def test_picture_shows_every_group_in_its_colour_and_height(pixels):
    trace = training_trace(layers=4, micro_batches=2, base_bytes=512 * MIB)
    image, line = pixels(trace), timeline(trace)
    # The two panels, without the legends at the side and the strips below.
    above, below = image[:520, :1300], image[520:900, :1300]
    for half, groups, levels in (
        (above, line.phases.groups, line.bytes_by_phase),
        (below, line.layers.groups, line.bytes_by_layer),
    ):
        heights = {
            group.label: int((half == colour(group.colour)).all(axis=2).sum(axis=0).max())
            for group, level in zip(groups, levels, strict=True)
            if level.max() > 30 * MIB
        }
        scale = heights["before the recording"] / 512
        assert len(heights) >= 4 and scale > 0.3
        for group, level in zip(groups, levels, strict=True):
            if group.label in heights:
                assert heights[group.label] == pytest.approx(scale * level.max() / MIB, abs=4), group.label


def test_picture_omits_groups_where_they_are_empty(pixels):
    recording = Recording()
    for i in range(30):
        recording.op("aten::mm")
        recording.layer("late" if i > 20 else None)
        recording.malloc(MIB if i == 29 else 0)
    image = pixels(recording.trace(base_bytes=8 * MIB)).astype(int)
    in_front = image[540:880, 110:500]
    assert (in_front.max(axis=2) - in_front.min(axis=2) < 8).all(), "grey before the recording, and nothing else"


@pytest.mark.parametrize("trace", [Recording().trace(), odd_trace(), load(LEGACY[1])])
def test_picture_of_any_trace_can_be_drawn(pixels, trace):
    image = pixels(trace)
    colours = image.reshape(-1, 3).astype(int) @ [1, 1 << 8, 1 << 16]
    assert len(set(colours.tolist())) > 2


@pytest.mark.parametrize(
    "package, write", [("plotly", write_page), ("plotly", write_picture), ("kaleido", write_picture)]
)
def test_missing_package_error_has_the_install_command(tmp_path, monkeypatch, package, write):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MemplugError) as caught:
        write(trace_figure(training_trace()), tmp_path / "file")
    assert package in caught.value.problem and "pip install 'memplug[pictures]'" in caught.value.advice
    assert not (tmp_path / "file").exists()


class Kaleido:
    """A stand-in for kaleido that draws nothing and keeps its arguments."""

    def __init__(self, monkeypatch, error: Exception | None = None) -> None:
        kaleido = pytest.importorskip("kaleido")
        monkeypatch.setattr(kaleido, "calc_fig_sync", self.calc)
        self.error = error

    def calc(self, figure, opts, kopts) -> bytes:
        if self.error is not None:
            raise self.error
        self.figure, self.opts, self.kopts = figure, opts, kopts
        return b"a picture"


def test_kaleido_gets_figure_and_size_and_no_network_resources(tmp_path, monkeypatch):
    given = Kaleido(monkeypatch)
    write_picture(trace_figure(training_trace()), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes() == b"a picture"
    assert given.opts["format"] == "png" and given.kopts == {"mathjax": False}
    sides = [round(given.opts[side] * given.opts["scale"]) for side in ("width", "height")]
    assert sides == [1650, 1045] and "updatemenus" not in given.figure["layout"], "a PNG has no buttons"
    assert given.figure["layout"]["title"]["text"].startswith("Memory in use: Stack")


def test_missing_chrome_error_names_alternatives(tmp_path, monkeypatch):
    errors = pytest.importorskip("kaleido.errors")
    Kaleido(monkeypatch, errors.ChromeNotFoundError("none"))
    with pytest.raises(MemplugError, match="needs Chrome or Chromium") as caught:
        write_picture(trace_figure(training_trace()), tmp_path / "file")
    assert "plotly_get_chrome" in caught.value.advice and "camera button" in caught.value.advice
    assert not (tmp_path / "file").exists()


def test_error_quotes_the_message_of_chrome(tmp_path, monkeypatch):
    Kaleido(monkeypatch, RuntimeError("the pipe is closed"))
    with pytest.raises(MemplugError, match="RuntimeError: the pipe is closed"):
        write_picture(trace_figure(training_trace()), tmp_path / "file")


def test_legends_name_every_layer_including_underscore_names(tmp_path, monkeypatch):
    given = Kaleido(monkeypatch)
    write_picture(trace_figure(odd_trace()), tmp_path / "picture.png")
    named: dict[str, list[str]] = {}
    for trace in given.figure["data"]:
        if trace.get("legend") in given.figure["layout"]:
            named.setdefault(trace["legend"], []).append(trace["name"])
    assert [len(labels) for labels in named.values()] == [3, 3]
    assert any(label.startswith("_orig_mod.") for label in named["legend3"])
    titles = [given.figure["layout"][legend]["title"]["text"] for legend in named]
    assert titles == ["asked for by phase", "asked for by layer"]


def test_legends_are_centred_beside_their_panels(tmp_path, monkeypatch):
    given = Kaleido(monkeypatch)
    write_picture(trace_figure(training_trace(micro_batches=8)), tmp_path / "picture.png")
    layout = given.figure["layout"]
    for legend, axis in (("legend", "yaxis"), ("legend3", "yaxis2")):
        assert layout[legend]["yanchor"] == "middle"
        assert layout[legend]["y"] == pytest.approx(sum(layout[axis]["domain"]) / 2)


@pytest.mark.parametrize("operators, every", [(2, 1), (100, None)])
def test_axis_of_a_short_trace_has_whole_number_ticks(page, operators, every):
    recording = Recording()
    for _ in range(operators):
        recording.op("aten::mm")
        recording.malloc(MIB)
    assert page(recording.trace()).layout["xaxis3"].get("dtick") == every
