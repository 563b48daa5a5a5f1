"""The pages of traces and of plans fill the window without scrolling, and hovered numbers have units."""

import json
import re

import pytest

from memplug.arena.plan.part import address_plan
from memplug.show.page import write_page
from memplug.show.plan_figure import plan_figure
from memplug.show.trace_figure import trace_figure
from tests.support.layouts import problem_of, stacked
from tests.support.show_traces import training_trace


@pytest.fixture(scope="module", params=["trace", "plan", "csv"])
def page(request, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    if request.param == "trace":
        write_page(trace_figure(training_trace()), path)
    else:
        write_page(plan_figure(phased_plan() if request.param == "plan" else csv_plan()), path)
    return path.read_text(encoding="utf-8")


def csv_plan():
    problem = problem_of((0, 9, 7 << 20), (2, 5, 9 << 20))
    return address_plan(problem, stacked(problem)).alone()


def phased_plan():
    from memplug.arena.plan import search
    from memplug.arena.plan.from_trace import last_step, problem_of

    problem = problem_of(last_step(training_trace()))
    return address_plan(problem, search.solve(problem, improve=False)).alone()


def figure_of(page: str) -> tuple[list[dict], dict, dict]:
    """Return the data, layout and configuration that the page gives to plotly."""
    decoder, at, found = json.JSONDecoder(), page.rindex("Plotly.newPlot("), []
    for bracket in "[{{":
        value, at = decoder.raw_decode(page, page.index(bracket, at))
        found.append(value)
    return tuple(found)


def markup_of(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.S)


def test_page_is_exactly_as_high_as_the_window(page):
    markup = markup_of(page)
    assert re.search(r"<style>[^<]*\bbody \{margin: 0\}", markup), "a browser's own margins would make it scroll"
    heights = re.findall(r'style="height: ?([^;]+);', markup)
    assert heights == ["100vh", "100%"], "the element around the figure, and the figure"


def test_figure_has_no_fixed_size_and_follows_the_window(page):
    _, layout, _ = figure_of(page)
    assert "height" not in layout and "width" not in layout
    div = re.search(r'id="(\w+)" class="plotly-graph-div"', page)[1]
    assert f"addEventListener('resize', () => Plotly.relayout('{div}', {{autosize: true}}))" in page


def test_page_declares_its_encoding_in_the_first_1024_bytes(page):
    assert b'charset="utf-8"' in page.encode()[:1024]


def test_hovered_bytes_have_the_unit_of_their_axis(page):
    data, layout, _ = figure_of(page)
    unit = layout["yaxis"]["title"]["text"].split()[-1]
    assert unit in ("KiB", "MiB", "GiB")
    templates = [each["hovertemplate"] for each in data if "%{y" in each.get("hovertemplate", "")]
    assert templates and all(re.search(rf"%{{y:\.3f}} {unit}\b", template) for template in templates)


def test_hover_text_names_the_unit_of_the_clock(page):
    data, layout, _ = figure_of(page)
    clock = next(axis["title"]["text"] for name, axis in layout.items() if name.startswith("xaxis") and "title" in axis)
    word = clock.split(",")[0].removesuffix(" of the step")
    strips = [words for each in data if each["type"] == "bar" for words in each["customdata"]]
    assert all(re.search(rf": from {word} [\d,]+ up to [\d,]+$", words) for words in strips)
    facts = re.search(r'<script id="facts" type="application/json">(.*?)</script>', page, re.S)
    assert strips or facts
    if facts:
        assert json.loads(facts[1])["clock"] == word
        assert "in use from ${facts.clock} ${number(lower[row])} up to" in page
