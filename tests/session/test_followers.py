"""Techniques that follow the program: when each is asked, and which of its parts is in force."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest

from memplug.errors import LayoutError
from memplug.plans.schema import MemoryPlan
from memplug.profile.recorder import Detail
from memplug.profile.records import Fingerprint
from memplug.session.followers import MOST_PARTS, Followers
from memplug.session.technique import Technique


@dataclass(eq=False)
class Part:
    number: int


class Numbers(Technique[Part]):
    """Proposes numbers as parts, if the session passes a trace."""

    def __init__(self, name: str, log: list[str]):
        self.name, self.log = name, log
        self.made = 0
        self.waits = False
        self.wrong = ""
        self.fails: str = ""

    def propose(self, trace: Any) -> Part | None:
        if self.fails == "propose":
            raise LayoutError("no number")
        if trace is None or self.waits:
            return None
        self.made += 1
        self.log.append(f"{self.name} proposes {self.made}")
        return Part(self.made)

    def judge(self, part: Part) -> str:
        return self.wrong

    def install(self, part: Part) -> None:
        if self.fails == "install":
            raise LayoutError("no room")
        self.log.append(f"{self.name} has {part.number}")

    def withdraw(self) -> None:
        self.log.append(f"{self.name} has none")

    def kept(self, plan: MemoryPlan) -> Part | None:
        if self.fails == "kept":
            raise LayoutError("no number at all")
        number = plan.parts.get(self.name)
        return Part(number) if number is not None else None

    def keep(self, part: Part, plan: MemoryPlan) -> MemoryPlan:
        return replace(plan, parts={**plan.parts, self.name: part.number})

    @property
    def detail(self) -> Detail | None:
        return Detail.REQUESTS


@pytest.fixture
def said() -> list[str]:
    return []


def following(said: list[str], *names: str, warmup_steps: int = 0) -> tuple[Followers, list[Numbers]]:
    techniques = [Numbers(name, said) for name in names]
    return Followers((each, warmup_steps) for each in techniques), techniques


def plan(**parts: int) -> MemoryPlan:
    """Return a plan with these parts."""
    return MemoryPlan(fingerprint=Fingerprint(), parts=parts)


TRACE: Any = object()


def test_techniques_propose_nothing_until_the_program_outlasts_warm_up(said: list[str]) -> None:
    followers, _ = following(said, "a", warmup_steps=2)
    for key in (None, None, None, "one", "one"):
        followers.end_step(key, TRACE)
    assert said == [] and followers.parts is None
    followers.end_step("one", TRACE)
    assert said == ["a proposes 1", "a has 1"]


def test_returning_program_gets_its_part_back_without_a_new_proposal(said: list[str]) -> None:
    followers, _ = following(said, "a")
    for key, ran in (("one", True), ("one", True), ("two", False), ("two", True)):
        followers.end_step(key, TRACE, ran)  # the third step ran "two", although "one" was expected
    assert said == ["a proposes 1", "a has 1", "a has none", "a proposes 2", "a has 2"]
    said.clear()
    for key in ("one", "two"):
        followers.end_step(key, None)
    assert said == ["a has 1", "a has 2"]


def test_technique_waits_for_earlier_parts_and_replans_when_they_change(said: list[str]) -> None:
    followers, (a, _) = following(said, "a", "b")
    followers.end_step("one", None)
    assert said == [], "a has proposed nothing yet, so b is not asked"
    followers.end_step("one", TRACE)
    assert said == ["a proposes 1", "a has 1"], "b is asked from the next step on"
    followers.end_step("one", TRACE)
    assert said[2:] == ["a proposes 2", "a has 2", "b has none"]
    a.waits = True
    followers.end_step("one", TRACE)
    assert said[5:] == ["b proposes 1", "b has 1"]
    assert [part.number for part in followers.parts.values()] == [2, 1]


@pytest.mark.parametrize("failure", ["propose", "install", "judge"])
def test_failing_technique_is_excluded_for_good_and_others_go_on(
    said: list[str], failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    followers, (a, b) = following(said, "a", "b")
    a.fails, a.wrong = failure, "it is odd" if failure == "judge" else ""
    for _ in range(4):
        followers.end_step("one", TRACE)
    assert "a has 1" not in said and "b has 1" in said
    assert a.off_because and not b.off_because and list(followers.parts) == ["b"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "goes on without the a" in warnings[0]


def test_run_resumes_from_kept_parts_of_all_techniques_and_programs(said: list[str]) -> None:
    followers, techniques = following(said, "a", "b")
    plans = {"one": plan(a=5, b=6), "two": plan(a=7)}
    found = followers.resume(plans, "one")
    assert said == ["a has 5", "b has 6"]
    assert {key: sorted(parts) for key, parts in found.items()} == {"one": ["a", "b"], "two": ["a"]}
    kept = plan()
    for technique in techniques:
        kept = technique.keep(found["one"][technique.name], kept)
    assert kept.parts == {"a": 5, "b": 6}
    said.clear()
    followers.end_step("two", None)
    assert said == ["a has 7", "b has none"], "b has no part for it"
    followers.end_step("two", TRACE)
    assert said[2:4] == ["a proposes 1", "a has 1"]


def test_kept_part_refused_by_its_judge_is_not_used(said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    followers, (a, _) = following(said, "a", "b")
    a.wrong = "it is odd"
    followers.resume({"one": plan(a=5, b=6)}, "one")
    assert said == [], "b was planned for a step with a's part in force"
    assert "a kept plan's part for the a is not used: it is odd" in caplog.text
    a.wrong = ""
    followers.end_step("one", TRACE)
    assert said[:2] == ["a proposes 1", "a has 1"]


def test_unreadable_kept_part_is_not_used(said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    followers, (a,) = following(said, "a")
    a.fails = "kept"
    assert followers.resume({"one": plan(a=5)}, "one") == {"one": {}} and said == []
    assert "a kept plan's part for the a is not used: no number at all" in caplog.text


def test_unexpected_inputs_withdraw_parts_until_the_program_is_confirmed(said: list[str]) -> None:
    followers, _ = following(said, "a", "b")
    followers.resume({"one": plan(a=5, b=6)}, "one")
    said.clear()
    followers.enter(None)
    assert said == ["a has none", "b has none"]
    followers.end_step("one", None)
    assert said[2:] == ["a has 5", "b has 6"]


def test_only_the_parts_of_the_latest_programs_are_remembered(said: list[str]) -> None:
    followers, _ = following(said, "a")
    for key in range(MOST_PARTS + 1):
        followers.end_step(key, None)
        followers.end_step(key, TRACE)
    said.clear()
    followers.end_step(1, None)
    assert said == ["a has 2"], "remembered"
    followers.end_step(0, None)
    assert said[1:] == ["a has none"], "forgotten"


def test_closing_withdraws_all_parts_and_ends_all_proposals(said: list[str]) -> None:
    followers, (a,) = following(said, "a")
    followers.end_step("one", None)
    followers.end_step("one", TRACE)
    followers.close("steps cannot be recorded")
    followers.end_step("one", TRACE)
    assert said == ["a proposes 1", "a has 1", "a has none"]
    assert a.off_because == "steps cannot be recorded" and followers.parts == {}
