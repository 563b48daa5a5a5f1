"""The report of a session, with one for each technique; and its numbers as events for DeepSpeed's monitor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from memplug.session.table import Stage
from memplug.session.technique_report import TechniqueReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One moment of a session. Each technique's report is an attribute by the technique's name, as in
    `report.arena.served`.

    Attributes:
        stage: "warm-up", "gen-policy", "stable", "detached", or "off" where the block switches memplug off.
        steps: that ended.
        program: index of the current program among those that are remembered; None before there is one.
        programs: how many are remembered.
        replans: how often a plan was made.
        planned_steps: steps that ran by a plan from their beginning.
        planning_stopped_because: which rank did not end as many steps as others; None while ranks agree.
        step_s: median of the last steps, in seconds from one `step()` to the next; None before there are two.
        resumed_from: file of the earlier run's plan that this run goes on from; None without one.
        not_resumed_because: why an earlier run's plan is not used; None where there is nothing to say.
        recorded_steps: steps that were recorded in detail.
        profiler: "operators" where steps are compared by their operators, "sizes" by the sizes of inputs alone.
        profiler_off_because: why operators are not compared; None while they are.
        techniques: the report of each, by name.
    """

    stage: str
    steps: int = 0
    program: int | None = None
    programs: int = 0
    replans: int = 0
    planned_steps: int = 0
    planning_stopped_because: str | None = None
    step_s: float | None = None
    resumed_from: str | None = None
    not_resumed_because: str | None = None
    recorded_steps: int = 0
    profiler: str = "sizes"
    profiler_off_because: str | None = None
    techniques: Mapping[str, TechniqueReport] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name != "techniques" and name in self.techniques:
            return self.techniques[name]
        raise AttributeError(f"a report has no {name!r}", name=name, obj=self)

    def as_dict(self) -> dict[str, Any]:
        """Returns all facts in one flat dict of what JSON has, with the technique's prefix, as in `arena_served`; of a
        session that is off, the stage alone.
        """
        if self.stage == Stage.OFF.value:
            return {"stage": self.stage}
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "techniques"}
        for technique in self.techniques.values():
            found |= technique.as_dict()
        return found


def monitor_events(report: Report, samples: int) -> list[tuple[str, float, int]]:
    """Returns events for `engine.monitor.write_events`: each number of a report, as `Train/memplug/...`."""
    numbers = {
        key: value
        for key, value in report.as_dict().items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return [(f"Train/memplug/{key}", float(value), samples) for key, value in numbers.items()]
