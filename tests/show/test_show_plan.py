"""`memplug show` of a plan: in words, as JSON, drawn, and refused if it is damaged."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from memplug.arena.plan.part import AddressPlan
from memplug.cli import app
from memplug.plans.plan_file import save
from tests.support.folders import DATA
from tests.support.layouts import recorded_plan


@pytest.fixture(scope="module")
def recorded() -> AddressPlan:
    return recorded_plan()


def run(*arguments: object):
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


def test_show_distinguishes_plans_from_traces(recorded, tmp_path):
    save(recorded.alone(), tmp_path / "plan.json")
    shown = run(tmp_path / "plan.json", "--json")
    assert shown.exit_code == 0 and json.loads(shown.stdout)["height_bytes"] == recorded.solution.height
    assert "arena" in run(tmp_path / "plan.json").stdout
    trace = run(DATA / "llama7b_long_ckpt.npz", "--json")
    assert "operators" in json.loads(trace.stdout)


def test_show_draws_a_plan_as_png_and_html(recorded, chrome, tmp_path):
    save(recorded.alone(), tmp_path / "plan.json")
    shown = run(tmp_path / "plan.json", "--png", tmp_path / "a.png", "--html", tmp_path / "a.html")
    assert shown.exit_code == 0, shown.stderr
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG" and "facts" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize("option", [("--snapshot", "x"), ("--chrome", "x"), ("--step", "0")])
def test_trace_options_are_refused_for_a_plan(recorded, tmp_path, option):
    save(recorded.alone(), tmp_path / "plan.json")
    shown = run(tmp_path / "plan.json", *option)
    assert shown.exit_code == 2 and option[0] in shown.stderr and "needs a trace" in shown.stderr


def test_damaged_plan_is_refused(recorded, tmp_path):
    save(recorded.alone(), tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(
        text.replace('"planner":"search"', '"planner":"magic"').replace('"search"', '"magic"')
    )
    shown = run(tmp_path / "plan.json")
    assert shown.exit_code == 1 and "What to do" in shown.stderr
