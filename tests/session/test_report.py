"""The report of a session as data: fields, their names in the flat dict, and missing techniques."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import FrozenInstanceError, dataclass, fields
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import memplug
from memplug.session import closing, out_of_memory
from memplug.session.report import Report, monitor_events
from memplug.session.technique_report import FollowerReport
from memplug.session.techniques import reports
from tests.support.blocks import LAYERS, Stack
from tests.support.hosts import block


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyReport(FollowerReport):
    prefix: ClassVar[str] = "toy_"
    advice: ClassVar[str] = "play less"

    calls: int = 0

    def explain(self, peak_bytes: int | None) -> tuple[str, ...]:
        return (f"toys: {self.calls} of {peak_bytes}",)

    def closing(self) -> str:
        return f"{self.calls} calls of toys"


def absent(why: str) -> Report:
    return Report(stage="stable", techniques=reports(None, (), lambda name: why))


@pytest.mark.parametrize("kind", [Report, *(type(each) for each in absent("").techniques.values())])
def test_every_report_field_is_documented(kind: type[Any]) -> None:
    text = " ".join(each.__doc__ for each in kind.__mro__ if each.__module__.startswith("memplug"))
    documented = {
        name
        for line in re.findall(r"^ {8}(\w+(?:, \w+)*): ", text.replace(" " * 12, ""), re.M)
        for name in line.split(", ")
    }
    assert {each.name for each in fields(kind)} <= documented


def test_new_techniques_report_appears_in_dict_monitor_note_and_log() -> None:
    report = Report(stage="stable", steps=3, techniques={"toy": ToyReport(state="playing", calls=7)})
    assert report.toy.calls == 7
    assert {"toy": "playing", "toy_calls": 7, "steps": 3}.items() <= report.as_dict().items()
    assert ("Train/memplug/toy_calls", 7.0, 40) in monitor_events(report, 40)
    note = out_of_memory.note("forward", None, report, 9)
    assert "\n  toys: 7 of 9\n" in note and '("host_budget_gib"), or play less' in note
    session = SimpleNamespace(report=lambda: report, agreed=SimpleNamespace(plans=False))
    assert closing.line(session) == "after 3 steps; 7 calls of toys"


def test_field_names_are_unique_in_the_flat_dict() -> None:
    report = absent("")
    assert len(report.as_dict()) == len(fields(Report)) - 1 + sum(
        len(fields(each)) for each in report.techniques.values()
    )


def test_flat_dict_prefixes_fields_with_the_technique() -> None:
    report = absent("it is Monday")
    assert report.arena.state == report.swap.state == "off" and report.arena.off_because == "it is Monday"
    known = {"arena": "off", "swap": "off", "arena_off_because": "it is Monday", "arena_served": 0, "forwards": 0}
    known |= {"native_bytes": None, "predicted_swap_peak_bytes": None, "predicted_swap_stall_s": None}
    assert known.items() <= report.as_dict().items()


def test_report_is_an_immutable_snapshot() -> None:
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


def test_unknown_technique_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no 'areena'"):
        _ = absent("").areena


def test_report_says_that_techniques_wait_until_the_model_trains() -> None:
    with memplug.attach(Stack(1), {**block(regions=LAYERS), "swap": {"enabled": False}}) as session:
        report = session.report()
        assert report.arena.state == "waiting" and report.arena.off_because is None
        assert report.swap.state == "off" and "block" in report.swap.off_because


def test_disabled_session_reports_every_technique_as_off() -> None:
    session = memplug.attach(Stack(1), {"enabled": False})
    report = session.report()
    assert report.as_dict() == {"stage": "off"}
    assert report.arena.state == report.swap.state == "off" and report.tokenwise.forwards == report.arena.served == 0
