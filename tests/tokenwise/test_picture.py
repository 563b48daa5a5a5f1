"""Decisions are shown as the plan has them: in words, as JSON, as bars beside the address map, in diffs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from memplug.cli import app
from memplug.figures.figure import Axis, Bars
from memplug.plans.plan_file import save
from memplug.plans.schema import MemoryPlan
from memplug.show.page import write_page
from memplug.show.plan_diff import diff
from memplug.show.plan_diff import rows as diff_rows
from memplug.show.plan_figure import plan_figure
from memplug.show.plan_summary import rows as plan_rows
from memplug.show.plan_summary import summary
from memplug.tokenwise.picture import bars as its_bars
from memplug.tokenwise.picture.decisions import decisions, rows
from memplug.tokenwise.plan.decisions import Decision, Decisions, Learnt, Setting
from tests.support.memory_plans import decided_plan
from tests.support.pictures import pixels_of

SWAP, HALF, KEEP = Decision("aten::mm", 1.0), Decision("aten::mm", 0.5), Decision("aten::mm", 1.0, keep=True)
MIB = 2**20
LATE = Learnt(communicates=False, offloads_late=True, unneeded={}, asks=False)


def swapping(mib: int = 3, **fields) -> Setting:
    plan = {1: SWAP, 2: HALF, 3: KEEP, 5: KEEP}
    amounts = {"forward_bytes": mib * MIB, "kept_bytes": 2 * MIB, "recomputed_bytes": 5 * MIB}
    return Setting("key", **{"plan": plan, **amounts, **fields})


def plain(mib: int = 7) -> Setting:
    return Setting("key", plain_bytes=1, kept_bytes=mib * MIB)


def planned(settings: dict[str, Setting], plan: MemoryPlan | None = None, **solution) -> MemoryPlan:
    """Return a plan with these settings of its regions, by default a plan with addresses."""
    plan = plan or decided_plan()
    plan, decided = replace(plan, training=decided_plan().training), Decisions.of(decided_plan())
    return plan.with_part(replace(decided, settings=settings, solution=replace(decided.solution, **solution)))


def without_addresses(plan: MemoryPlan) -> MemoryPlan:
    return replace(plan, parts={name: part for name, part in plan.parts.items() if name != "arena"})


def layers(count: int, plains: int = 0) -> dict[str, Setting]:
    """Return settings of `count` layers, the last `plains` of them plain."""
    return {f"model.layers.{at}": plain() if at >= count - plains else swapping(3 + at % 2) for at in range(count)}


# -- numbers and words -------------------------------------------------------------------------------------------------


def test_shown_decisions_have_the_numbers_of_the_plan():
    plan = decided_plan()
    facts, decided = decisions(plan), Decisions.of(plan)
    first, second = facts["regions"]
    assert first["name"] == "layers.0" and not first["plain"] and second["name"] == "layers.1" and second["plain"]
    assert (first["swapped_by_rows_operators"], first["kept_operators"], first["swapped_whole_operators"]) == (1, 1, 0)
    assert (facts["step_s"], facts["host_bytes"], facts["device_bytes"], facts["bound"]) == (3.0, 4, 5, "none")
    assert facts["peak_bytes"] == decided.peak_bytes and facts["full_recomputation_s"] == decided.full_recomputation_s
    assert (facts["run"], facts["program_operators"], facts["inputs"]) == ("20261123T1-a", 3, ["int64[1, 8]"])
    assert (facts["d2h_bytes_per_s"], facts["h2d_bytes_per_s"]) == (5e10, 0.0)


def test_shown_totals_are_sums_over_regions_for_one_forward():
    facts = decisions(planned({"layers.0": swapping(), "layers.1": swapping(4, learnt=LATE), "layers.2": plain()}))
    names = ("swapped_bytes", "kept_bytes", "recomputed_bytes", "offloads_late_bytes")
    assert [facts[name] // MIB for name in names] == [7, 11, 10, 4]
    operators = ("swapped_whole_operators", "swapped_by_rows_operators", "kept_operators", "plain_regions")
    assert [facts[name] for name in operators] == [2, 2, 4, 1]
    assert [region["kept_bytes"] // MIB for region in facts["regions"]] == [2, 2, 7]


def test_regions_are_shown_in_order_of_their_numbers():
    names = ["model.layers.10", "model.layers.0", "model.layers.2", "head", "model.layers.1"]
    facts = decisions(planned(dict.fromkeys(names, swapping())))
    shown = [region["name"] for region in facts["regions"]]
    assert shown == ["model.layers.0", "model.layers.1", "model.layers.2", "model.layers.10", "head"]


@pytest.mark.parametrize("trained", [False, True])
def test_plan_without_decisions_shows_no_decisions(trained, tmp_path):
    plan = decided_plan()
    if trained:
        parts = {"arena": plan.parts["arena"]}
        plan = replace(plan, training=replace(plan.training, program=None), parts=parts)
    else:
        plan = replace(plan, training=None)
    facts = summary(plan)
    assert facts["decisions"] is None and its_bars.column(plan) is None
    assert not {"made by", "decisions"} & dict(plan_rows(facts)).keys()
    assert diff(plan, plan)["decisions"] is None and "decisions" not in dict(diff_rows(diff(plan, plan)))


def test_summary_names_swapped_kept_and_recomputed_bytes_and_predictions():
    plan = planned(layers(6, plains=2), step_s=0.0125, host_bytes=3 * MIB, bound="host")
    words = dict(rows(decisions(plan)))
    assert words["decisions"] == "14.00 MiB swapped, 22.00 MiB kept, 20.00 MiB recomputed in one forward of 6 regions"
    assert words["captured operators"] == "4 swapped whole, 4 by rows, 8 kept"
    assert words["predicted step"].startswith("12.50 ms") and words["  full recomputation"] == "4.500 s"
    assert (words["host memory"], words["bound by"], words["predicted peak"]) == (
        "3.00 MiB",
        "host",
        "7 bytes on the device",
    )
    assert words["link"] == "50.0 GB/s to the host, 0.0 GB/s to the device"
    lines = [value for _, value in rows(decisions(plan))]
    assert "layer 0: 3.00 MiB swapped, 2.00 MiB kept, 5.00 MiB recomputed" in lines
    assert "layers 4-5: 7.00 MiB kept each, as without memplug" in lines
    late = dict(rows(decisions(planned({"layers.0": swapping(learnt=LATE)}))))
    assert late["  only if needed"] == "3.00 MiB of the swapped bytes" and "  only if needed" not in words
    assert late["  by region"].endswith("offloaded only if needed")


def test_summary_of_many_regions_takes_few_lines_that_add_up():
    found = rows(decisions(planned(layers(80))))
    assert len(found) < 25
    assert found[-1][1] == "73 others: 256.00 MiB swapped, 146.00 MiB kept, 365.00 MiB recomputed in all"


def test_plan_without_addresses_shows_no_arena_rows():
    plan = without_addresses(planned(layers(3)))
    words = dict(plan_rows(summary(plan)))
    assert not {"arena", "requests", "fragmentation", "lower bound", "planner", "streams"} & words.keys()
    assert words["addresses"].startswith("none") and "decisions" in words


# -- the command -------------------------------------------------------------------------------------------------------


def run(*arguments: object):
    shown = CliRunner().invoke(app, [*map(str, arguments)])
    assert shown.exit_code == 0, shown.output
    return shown.stdout


@pytest.mark.parametrize("addresses", [True, False])
def test_show_prints_and_draws_decisions(addresses, chrome, tmp_path):
    plan = planned(layers(3, plains=1))
    plan = plan if addresses else without_addresses(plan)
    file, png, page = (tmp_path / name for name in ("plan.json", "a.png", "a.html"))
    save(plan, file)
    facts = json.loads(run("show", file, "--json"))["decisions"]
    assert facts == json.loads(json.dumps(decisions(plan)))
    text = run("show", file, "--png", png, "--html", page)
    assert "run 20261123T1-a" in text and "layer 2: 7.00 MiB kept, as without memplug" in text
    assert ("arena" in text.replace("no arena", "")) == addresses
    assert png.read_bytes()[:4] == b"\x89PNG" and "model.layers.2: 7.00 MiB kept" in page.read_text()


# -- pictures ----------------------------------------------------------------------------------------------------------


def drawn(plan: MemoryPlan) -> tuple[tuple[Bars, ...], Axis, Axis]:
    """Return the bars, one per kind, and their two axes."""
    column = its_bars.column(plan)
    (panel,) = column.panels
    return panel.content, column.x, panel.y


def test_bars_show_every_byte_of_every_region():
    bars, x, y = drawn(planned(layers(5, plains=2)))
    assert [each.group.label for each in bars] == ["swapped", "kept", "kept, as without memplug", "recomputed"]
    assert x.unit == ("MiB", MIB) and tuple(y.ticks.values()) == ("0", "1", "2", "3", "4")
    expected = [[3, 4, 3, 0, 0], [2, 2, 2, 0, 0], [0, 0, 0, 7, 7], [5, 5, 5, 0, 0]]
    assert [(each.length / MIB).tolist() for each in bars] == expected
    begins = np.cumsum(expected, axis=0) - expected
    assert [(each.begin / MIB).tolist() for each in bars] == begins.tolist()
    assert all(each.words[3] == "model.layers.3: 7.00 MiB kept, as without memplug" for each in bars)


def test_bytes_swapped_only_if_needed_have_separate_bars(chrome, tmp_path):
    late = planned({"layers.0": swapping(4), "layers.1": swapping(3, learnt=LATE)})
    bars, _, _ = drawn(late)
    amounts = {each.group.label: (each.length / MIB).tolist() for each in bars}
    assert amounts["swapped"] == [4, 0] and amounts["swapped, only if needed"] == [0, 3]
    soon = planned({"layers.0": swapping(4), "layers.1": swapping(3)})
    images = [pixels_of(plan_figure(plan), tmp_path / "a.png") for plan in (late, soon)]
    assert area(images[0], "#8e2f6f")[0] < 0.9 * area(images[1], "#8e2f6f")[0], "bars of late offloads are hatched"
    (hatched,) = [
        trace for trace in figure_of(late, tmp_path)["data"] if trace.get("name") == "swapped, only if needed"
    ]
    assert hatched["marker"]["pattern"]["shape"] == "/"


@pytest.mark.parametrize("count", [1, 2, 40, 80, 200])
def test_labels_of_many_regions_do_not_overlap(count):
    bars, _, y = drawn(planned(layers(count)))
    assert len(bars[0].row) == count and min(count, 20) <= len(y.ticks) <= 40 and next(iter(y.ticks)) == 0


def area(image: np.ndarray, colour: str) -> tuple[int, float]:
    """Return the number of pixels of a colour, and the leftmost one's position as a share of the width."""
    rgb = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    found = (image == rgb).all(axis=2)
    return int(found.sum()), float(found.any(axis=0).argmax() / image.shape[1])


@pytest.mark.long
@pytest.mark.parametrize("addresses", [True, False])
@pytest.mark.parametrize("count", [2, 80])
def test_bar_lengths_are_proportional_to_bytes(count, addresses, chrome, tmp_path):
    plan = planned({f"layers.{at}": swapping(4) for at in range(count)})
    plan = plan if addresses else without_addresses(plan)
    image = pixels_of(plan_figure(plan), tmp_path / "a.png")
    assert image.shape[:2] == (1045, 1650)
    colours = {each.group.label: each.group.colour for each in drawn(plan)[0]}
    areas = {label: area(image, colour)[0] for label, colour in colours.items()}
    assert areas["swapped"] / areas["kept"] == pytest.approx(2, rel=0.1)
    assert areas["recomputed"] / areas["kept"] == pytest.approx(2.5, rel=0.1)
    begin = area(image[: -image.shape[0] // 8], colours["swapped"])[1]
    assert (begin > 0.6) == addresses, "bars are right of the map, or fill the picture"
    bare = pixels_of(plan_figure(replace(plan, training=None)), tmp_path / "b.png")
    assert area(bare, colours["swapped"])[0] == area(bare, colours["kept"])[0] == 0


def figure_of(plan: MemoryPlan, path: Path) -> dict:
    """Return the data that a page gives to plotly."""
    write_page(plan_figure(plan), path / "page.html")
    text = (path / "page.html").read_text()
    data, end = json.JSONDecoder().raw_decode(text, text.index("[", text.rindex("Plotly.newPlot(")))
    return {"data": data, "layout": json.JSONDecoder().raw_decode(text, text.index("{", end))[0]}


def test_page_draws_bars_on_separate_axes_beside_the_map(tmp_path):
    with_bars = figure_of(planned(layers(3, plains=1)), tmp_path)
    bare = figure_of(replace(decided_plan(), training=None), tmp_path)
    bars = [trace for trace in with_bars["data"] if trace.get("yaxis") == "y5"]
    assert [trace["name"] for trace in bars] == ["swapped", "kept", "kept, as without memplug", "recomputed"]
    layout = with_bars["layout"]
    assert layout["yaxis2"] == bare["layout"]["yaxis2"] and layout["yaxis2"]["title"]["text"].startswith("address")
    axes = [layout[f"xaxis{at}"]["domain"] for at in ("", 2, 3, 4)]
    assert max(domain[1] for domain in axes) < layout["legend"]["x"] < layout["xaxis5"]["domain"][0]
    assert layout["yaxis5"]["range"][0] > layout["yaxis5"]["range"][1] and layout["yaxis5"]["ticktext"][0] == "0"
    assert "xaxis5" not in bare["layout"] and bare["layout"]["xaxis2"]["domain"] == [0, 1]
    for button in layout["updatemenus"][0]["buttons"]:
        visible = button["args"][0]["visible"]
        assert len(visible) == len(with_bars["data"]) and all(visible[-len(bars) :]), "the switch affects only the map"


def test_region_names_are_escaped_in_page_and_picture(chrome, tmp_path):
    plan = planned({"<b>$\\frac$</b>": swapping(), "<b>$b^$</b>": plain()})
    for each in (plan, without_addresses(plan)):
        write_page(plan_figure(each), tmp_path / "a.html")
        page = (tmp_path / "a.html").read_text()
        assert "&lt;b&gt;" in page.replace("\\u0026", "&") and "<b>$" not in page.replace("\\u003c", "<")
        pixels_of(plan_figure(each), tmp_path / "a.png")


def test_page_without_addresses_has_no_map(tmp_path):
    write_page(plan_figure(without_addresses(planned(layers(2)))), tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert '"title":{"text":"region"}' in page and "address, " not in page.split("</head>")[-1].split("newPlot")[-1]
    assert '<script id="facts"' not in page and "without addresses" in page


# -- two plans ---------------------------------------------------------------------------------------------------------


def test_diff_of_a_plan_with_itself_is_empty():
    facts = diff(plan := planned(layers(4, plains=1)), plan)["decisions"]
    assert facts["changed"] == [] and facts["a"] == facts["b"] and facts["regions"] == 4
    assert dict(diff_rows(diff(plan, plan)))["decisions"] == "the same in both"


@pytest.mark.parametrize(
    ("change", "operators"),
    [
        ({"plan": {1: SWAP, 2: HALF, 3: KEEP, 5: HALF}}, 1),
        ({"plan": {1: SWAP, 2: Decision("aten::mm", 0.25), 3: KEEP}}, 2),
        ({"plan": None, "plain_bytes": 9}, 4),
        ({"swaps_input": False}, 0),
        ({"plan": {}}, 4),
    ],
)
def test_diff_names_the_region_with_other_decisions(change, operators):
    settings = layers(4)
    other = {**settings, "model.layers.2": replace(settings["model.layers.2"], **change)}
    facts = diff(planned(settings), planned(other))["decisions"]
    (changed,) = facts["changed"]
    assert changed["name"] == "model.layers.2" and changed["changed_operators"] == operators
    assert facts["changed_regions"] == 1
    back = diff(planned(other), planned(settings))["decisions"]["changed"][0]
    assert (back["a"], back["b"], back["changed_operators"]) == (changed["b"], changed["a"], operators)


def test_changed_byte_counts_alone_are_not_a_changed_decision():
    facts = diff(planned({"layers.0": swapping(3)}), planned({"layers.0": swapping(6)}))["decisions"]
    assert facts["changed"] == [] and facts["b"]["swapped_bytes"] == 2 * facts["a"]["swapped_bytes"] == 6 * MIB


def test_regions_in_only_one_plan_count_as_changed():
    facts = diff(planned(layers(2)), planned(layers(3)))
    (changed,) = facts["decisions"]["changed"]
    assert changed["name"] == "model.layers.2" and changed["a"] is None and changed["b"]["swapped_bytes"] == 3 * MIB
    assert "only in B, 3.00 MiB swapped" in dict(diff_rows(facts))["  by region"]


def test_diff_shows_costs_side_by_side():
    a = planned(layers(4), step_s=2.0, host_bytes=4 * MIB, bound="none")
    b = planned(layers(4, plains=2), step_s=1.5, host_bytes=2 * MIB, bound="host")
    words = dict(diff_rows(diff(a, b)))
    assert words["decisions"] == "changed in 2 of 4 regions"
    assert words["  swapped"] == "14.00 MiB in A, 7.00 MiB in B: 7.00 MiB less, -50.00%"
    assert words["  kept"] == "8.00 MiB in A, 18.00 MiB in B: 10.00 MiB more, +125.00%"
    assert words["  recomputed"] == "20.00 MiB in A, 10.00 MiB in B: 10.00 MiB less, -50.00%"
    assert words["predicted step"] == "2.000 s in A, 1.500 s in B: 500.00 ms less, -25.00%"
    assert words["predicted peak"] == "7 bytes in both"
    assert words["host memory"] == "4.00 MiB in A, 2.00 MiB in B: 2.00 MiB less, -50.00%"
    assert words["bound by"] == "nothing in A, host in B"


def test_plan_with_decisions_is_compared_with_one_without(tmp_path):
    a, b = planned(layers(2)), replace(decided_plan(), training=None)
    facts = diff(a, b)
    assert facts["decisions"]["b"] is None and facts["decisions"]["a"]["swapped_bytes"] == 7 * MIB
    words = dict(diff_rows(facts))
    assert words["decisions"] == "only in A, of 2 regions" and words["  swapped"] == "7.00 MiB"
    save(a, tmp_path / "a.json")
    save(b, tmp_path / "b.json")
    assert json.loads(run("diff", tmp_path / "a.json", tmp_path / "b.json", "--json"))["decisions"]["b"] is None
    assert "only in A, of 2 regions" in run("diff", tmp_path / "a.json", tmp_path / "b.json")


def test_addresses_in_only_one_plan_are_not_compared():
    a, b = planned(layers(2)), without_addresses(planned(layers(2)))
    words = dict(diff_rows(diff(a, b)))
    assert words["addresses"].startswith("only in A: 4 requests") and "height" not in words and "resized" not in words
    assert dict(diff_rows(diff(b, b)))["addresses"] == "none in both"
    assert "addresses" not in dict(diff_rows(diff(a, a)))
