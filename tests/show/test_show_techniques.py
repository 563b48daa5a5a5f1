"""Each installed technique shows its own part of a plan, and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from memplug.block import TECHNIQUES, MemplugConfig
from memplug.figures.technique_picture import TechniquePicture
from memplug.show import plan_diff, plan_summary, techniques
from memplug.show.page import write_page
from memplug.show.plan_figure import plan_figure
from memplug.swap.plan.part import SwapPart
from tests.support.memory_plans import decided_plan, target


def plan():
    """Return a plan with a part of each technique."""
    return decided_plan().with_part(SwapPart(targets=(target("aten::mm", 3),)))


def test_every_technique_has_a_picture_and_a_position_of_its_own():
    found = techniques.pictures()
    assert tuple(found) == TECHNIQUES and all(isinstance(each, TechniquePicture) for each in found.values())
    assert len({each.place for each in found.values()}) == len(found)
    assert [each.place for each in techniques.in_place()] == sorted(each.place for each in found.values())


def test_techniques_share_no_keys_in_summary_and_diff():
    a, found = plan(), techniques.in_place()
    for keys in (
        [key for each in found for key in each.facts(a)],
        [key for each in found for key in each.diff(a, a)],
        [key for each in found for key in each.side(a)],
    ):
        assert max(Counter([*keys, "fingerprint", "a", "b"]).values()) == 1
    assert {"height_bytes", "decisions", "swap_list", "fingerprint"} <= plan_summary.summary(a).keys()


@pytest.fixture(params=TECHNIQUES)
def gone(request, monkeypatch) -> str:
    """Make the room of a technique appear to be missing, and return its name."""
    monkeypatch.setattr(techniques, "has_technique", lambda name: name != request.param)
    return request.param


def test_other_techniques_show_their_parts_if_one_is_missing(gone, tmp_path):
    a = plan()
    facts = plan_summary.summary(a)
    keys = {"arena": "height_bytes", "tokenwise": "decisions", "swap": "swap_list"}
    assert {name for name, key in keys.items() if key in facts} == {*TECHNIQUES} - {gone}
    assert dict(plan_summary.rows(facts)).keys() >= {"model", "fingerprint"}
    assert plan_diff.rows(plan_diff.diff(a, a))
    write_page(plan_figure(a), tmp_path / "page.html")


def test_default_picture_of_a_technique_is_empty(monkeypatch, tmp_path):
    monkeypatch.setattr(techniques, "pictures", lambda: {"toy": TechniquePicture()})
    a = plan()
    assert plan_summary.summary(a).keys() == {"fingerprint"} and plan_figure(a).columns == []
    assert plan_diff.rows(plan_diff.diff(a, replace(a))) == [
        ("recorded from", "the same program, on the same kind of machine")
    ]
    assert TechniquePicture().block_words(MemplugConfig(), served=False) == []
    assert list(TechniquePicture().block_warnings(MemplugConfig(), {})) == []
    write_page(plan_figure(a), tmp_path / "page.html")
    assert "Plan of Llama: nothing to draw" in (tmp_path / "page.html").read_text()
