"""The address map of a plan: its rectangles, its curve, and the texts at the pointer."""

import base64
import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from memplug.arena.picture.address_map import rectangles, span
from memplug.arena.plan.part import AddressPlan, address_plan
from memplug.arena.plan.problem import Problem, Solution, buffers
from memplug.errors import MemplugError
from memplug.figures.figure import Rectangles
from memplug.profile.trace import Fingerprint, Layer, Pass, Phase
from memplug.show.page import write_page
from memplug.show.picture import write_picture
from memplug.show.plan_figure import plan_figure
from memplug.show.plan_summary import rows, summary
from memplug.show.raster import largest, raster
from tests.support.layouts import address_plans, problem_of, recorded_plan, stacked
from tests.support.pictures import pixels_of


@pytest.fixture(scope="module")
def recorded() -> AddressPlan:
    return recorded_plan()


def named(**fields) -> AddressPlan:
    """Return a plan with two phases, two layers, and markup in some names and ids."""
    problem = problem_of((0, 6, 512), (1, 3, 1024), (3, 9, 1024))
    table = problem.buffers.copy()
    table["lower_phase"], table["upper_phase"] = [0, 0, 1], [1, 0, 1]
    table["lower_layer"], table["upper_layer"] = [0, 1, 1], [0, 1, -1]
    problem = Problem(
        buffers=table,
        ids=np.array(["</script>", "b", "c"]),
        phases=(Phase(Pass.FORWARD, 0), Phase(Pass.BACKWARD, 0)),
        layers=(Layer("layers.0"), Layer("<b>layers.1</b>")),
        fingerprint=Fingerprint(model="<i>Llama</i>"),
        **fields,
    )
    return address_plan(problem, stacked(problem))


@given(address_plans())
def test_pixels_show_the_group_of_the_request_at_their_address_and_time(plan):
    drawn, (begin, end) = next(iter(rectangles(plan).values())), span(plan.problem)
    if not plan.solution.height:
        return
    height = plan.solution.height
    pixels = raster(drawn, (begin, end), height, (height, end - begin))
    expected = np.zeros((height, end - begin), np.uint8)
    for row, offset in enumerate(plan.solution.offsets.tolist()):
        buffer = plan.problem.buffer(row)
        expected[offset : offset + buffer.size, buffer.lower - begin : buffer.upper - begin] = drawn.of[row] + 1
    assert np.array_equal(pixels, expected) and drawn.of.max() < len(drawn.groups)


def painted(plan: AddressPlan, values: list[int], height_bytes: int, shape: tuple[int, int]) -> np.ndarray:
    drawn: Rectangles = replace(rectangles(plan)["size"], of=np.array(values) - 1)
    return raster(drawn, span(plan.problem), height_bytes, shape)


def test_tiny_requests_get_a_pixel_without_covering_long_lived_ones():
    plan = address_plan(problem := problem_of((0, 1000, 1000), (500, 501, 1), (700, 702, 5)), stacked(problem))
    pixels = painted(plan, [1, 2, 3], plan.solution.height, (10, 10))
    assert (pixels[:9] == 1).all() and set(np.unique(pixels[9])) <= {1, 2, 3} and 3 not in pixels[:9]
    brief = address_plan(problem := problem_of((0, 1000, 500), (400, 401, 500)), stacked(problem))
    pixels = painted(brief, [1, 2], 1000, (10, 10))
    assert (pixels[:5] == 1).all() and (pixels[5:, 4] == 2).all() and (pixels[5:] > 0).sum() == 5
    assert painted(plan, [1, 2, 3], 2000, (2000, 1000))[1000, 500] == 2


def test_curve_marks_the_peak_and_requests_are_ranked_by_area(recorded):
    drawn = rectangles(recorded)["phase"]
    curve, _, phases, layers = plan_figure(recorded.alone()).columns[0].panels
    in_use, mark = curve.content[0], curve.content[-1]
    assert mark.y == recorded.problem.lower_bound == in_use.levels.max() == in_use.levels[0, in_use.x == mark.x]
    area = (drawn.upper - drawn.lower) * (drawn.stop - drawn.start)
    chosen = largest(drawn, 20)
    assert len(chosen) == 20 and area[chosen].min() >= np.delete(area, chosen).max()
    assert len(phases.content[0].begin) == len(recorded.problem.phases) and len(layers.content[0].begin) > 8


@pytest.mark.long
@pytest.mark.parametrize("made", ["recorded", "named", "empty", "one", "csv"])
def test_any_plan_has_a_picture_and_a_page(made, recorded, chrome, tmp_path):
    problems = {"empty": problem_of(), "one": problem_of((5, 9, 100)), "csv": problem_of((0, 9, 7), (2, 5, 9000))}
    plan = recorded if made == "recorded" else named() if made == "named" else None
    if plan is None:
        plan = address_plan(problems[made], stacked(problems[made]))
    image = pixels_of(plan_figure(plan.alone()), tmp_path / "map.png").astype(int)
    assert image.shape[:2] == (1045, 1650)
    # More than text is drawn: over a tenth of the pixels is neither white nor grey.
    coloured = (image.max(axis=2) - image.min(axis=2) > 38).mean()
    assert coloured > 0.1 if made in ("recorded", "named", "one") else coloured >= 0
    write_page(plan_figure(plan.alone()), tmp_path / "map.html")
    assert (tmp_path / "map.html").stat().st_size < 12e6


def facts_of(page: str) -> dict:
    return json.loads(re.search(r'<script id="facts" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def unpacked(packed: list[str]) -> list[int]:
    kind, text = packed
    return np.frombuffer(base64.b64decode(text), {"Int32Array": "<i4", "Float64Array": "<f8"}[kind]).tolist()


def test_page_needs_no_network_and_holds_every_request(recorded, tmp_path):
    write_page(plan_figure(recorded.alone()), tmp_path / "map.html")
    page = (tmp_path / "map.html").read_text()
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="http', page)
    facts, table = facts_of(page), recorded.problem.buffers
    assert unpacked(facts["lower"]) == table["lower"].tolist() and unpacked(facts["upper"]) == table["upper"].tolist()
    assert unpacked(facts["start"]) == recorded.solution.offsets.tolist()
    assert unpacked(facts["nbytes"]) == table["size"].tolist()
    assert unpacked(facts["numbers"]) == recorded.problem.ids.tolist()
    assert [facts["words"][1][0][index] for index in (0, 7)] == ["layers.0", "layers.7"]


def test_names_with_markup_are_shown_as_text(tmp_path):
    write_page(plan_figure(named().alone()), tmp_path / "map.html")
    page = (tmp_path / "map.html").read_text()
    assert facts_of(page)["names"][0] == "</script>" and facts_of(page)["words"][1][0][1] == "<b>layers.1</b>"
    head = page.split("<body>")[0]
    assert "<i>Llama</i>" not in head and "&lt;i&gt;Llama" in head
    assert "<b>layers.1</b>" not in page.replace("\\u003c", "<").split("application/json")[0]


def test_page_of_three_hundred_thousand_requests_stays_below_25_mb(tmp_path):
    count = 300_000
    lower = np.arange(count) * 2
    table = buffers(np.stack([lower, lower + 1 + np.arange(count) % 3000, np.full(count, 512)], axis=1))
    offsets = np.arange(count) % 3001 * 512
    problem = Problem(buffers=table, phases=(Phase(Pass.FORWARD, 0),), layers=(Layer("layers.0"),))
    plan = address_plan(problem, Solution(offsets=offsets, height=3001 * 512, planner="test"))
    write_page(plan_figure(plan.alone()), tmp_path / "map.html")
    assert (tmp_path / "map.html").stat().st_size < 25e6


@pytest.mark.parametrize(("write", "package"), [(write_page, "plotly"), (write_picture, "kaleido")])
def test_missing_package_error_names_the_extra_to_install(write, package, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MemplugError, match=f"needs {package}") as raised:
        write(plan_figure(named().alone()), tmp_path / "view")
    assert "memplug[pictures]" in raised.value.advice


def test_summary_by_phase_and_by_layer_adds_up_to_the_peak(recorded):
    facts = summary(recorded.alone())
    assert facts["requests"] == 1284 and facts["height_bytes"] == recorded.solution.height
    for held in (facts["peak_bytes_by_phase"], facts["peak_bytes_by_layer"]):
        assert sum(held.values()) == facts["lower_bound_bytes"]
    assert facts["outliving_requests"] == 2 and facts["outliving_bytes"] == 2 * 524288
    text = "\n".join(" ".join(row) for row in rows(facts))
    names = list(dict(rows(facts)))
    assert names.index("arena") < names.index("efficiency") < names.index("requests"), "bytes come first"
    assert facts["efficiency"] == facts["live_peak_bytes"] / facts["height_bytes"] == 1
    assert "1,284" in text and "29.47 GiB" in text and "fragmentation 0.0000%" in text
