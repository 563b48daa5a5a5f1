"""The report of a session as data: fields, their names in the flat dict, and techniques that are not there."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch

import memplug
from memplug.session.report import Report
from memplug.session.techniques import reports
from tests.support.blocks import LAYERS, Stack
from tests.support.hosts import block


def absent(why: str) -> Report:
    return Report(stage="stable", techniques=reports(None, (), lambda name: why))


@pytest.mark.parametrize("kind", [Report, *(type(each) for each in absent("").techniques.values())])
def test_every_field_is_documented(kind: type[Any]) -> None:
    text = " ".join(each.__doc__ for each in kind.__mro__ if each.__module__.startswith("memplug"))
    documented = {
        name
        for line in re.findall(r"^ {8}(\w+(?:, \w+)*): ", text.replace(" " * 12, ""), re.M)
        for name in line.split(", ")
    }
    assert {each.name for each in fields(kind)} <= documented


def test_names_are_unique_in_the_flat_dict() -> None:
    report = absent("")
    assert len(report.as_dict()) == len(fields(Report)) - 1 + sum(
        len(fields(each)) for each in report.techniques.values()
    )


def test_the_flat_dict_has_the_technique_in_front() -> None:
    report = absent("it is Monday")
    assert report.arena.state == report.swap.state == "off" and report.arena.off_because == "it is Monday"
    known = {"arena": "off", "swap": "off", "arena_off_because": "it is Monday", "arena_served": 0, "forwards": 0}
    known |= {"native_bytes": None, "predicted_swap_peak_bytes": None, "predicted_swap_stall_s": None}
    assert known.items() <= report.as_dict().items()


def test_a_report_stays_as_it_was() -> None:
    model = Stack(2)
    with memplug.attach(model, block(alpha=0, regions=LAYERS)) as session:
        before = session.report()
        model(torch.randn(2, 6, 16)).backward()
        session.step()
        assert (before.steps, before.tokenwise.forwards) == (0, 0)
        assert (session.report().steps, session.report().tokenwise.forwards) == (1, 2)
    for part, name in ((before, "steps"), (before.tokenwise, "forwards"), (before.arena, "served")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, 7)
    for twin in (copy.deepcopy(before), pickle.loads(pickle.dumps(before))):
        assert twin == before and twin.as_dict() == before.as_dict()


def test_a_name_that_is_no_technique_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no 'areena'"):
        _ = absent("").areena


def test_techniques_wait_until_the_model_trains() -> None:
    with memplug.attach(Stack(1), {**block(regions=LAYERS), "swap": {"enabled": False}}) as session:
        report = session.report()
        assert report.arena.state == "waiting" and report.arena.off_because is None
        assert report.swap.state == "off" and "block" in report.swap.off_because


def test_a_session_that_is_off_answers_for_each_technique() -> None:
    session = memplug.attach(Stack(1), {"enabled": False})
    report = session.report()
    assert report.as_dict() == {"stage": "off"}
    assert report.arena.state == report.swap.state == "off" and report.tokenwise.forwards == report.arena.served == 0
