"""Plans are shown by the present techniques, each of which shows only its own part."""

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


def test_every_technique_of_the_block_has_a_picture_and_a_place_of_its_own():
    found = techniques.pictures()
    assert tuple(found) == TECHNIQUES and all(isinstance(each, TechniquePicture) for each in found.values())
    assert len({each.place for each in found.values()}) == len(found)
    assert [each.place for each in techniques.in_place()] == sorted(each.place for each in found.values())


def test_no_technique_takes_the_keys_of_another():
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
    """Remove the room of a technique, and return its name."""
    monkeypatch.setattr(techniques, "has_technique", lambda name: name != request.param)
    return request.param


def test_without_a_technique_the_others_show_their_parts(gone, tmp_path):
    a = plan()
    facts = plan_summary.summary(a)
    keys = {"arena": "height_bytes", "tokenwise": "decisions", "swap": "swap_list"}
    assert {name for name, key in keys.items() if key in facts} == {*TECHNIQUES} - {gone}
    assert dict(plan_summary.rows(facts)).keys() >= {"model", "fingerprint"}
    assert plan_diff.rows(plan_diff.diff(a, a))
    write_page(plan_figure(a), tmp_path / "page.html")


def test_a_technique_without_a_picture_of_its_own_has_nothing_to_say(monkeypatch, tmp_path):
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
