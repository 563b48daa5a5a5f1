"""The report of a session and its techniques, and its numbers as events for DeepSpeed's monitor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from memplug.session.table import Stage
from memplug.session.technique_report import TechniqueReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The state of a session at one moment.

    Each technique's report is an attribute by the technique's name, as in `report.arena.served`.

    Attributes:
        stage: "warm-up", "gen-policy", "stable" (that of `program`), "detached", or "off" if the block switches memplug
            off.
        steps: number of steps that ended.
        program: index, among the remembered ones, of the program that the next step is expected to run; None until
            there is one.
        programs: number of remembered programs.
        replans: number of plans made.
        planned_steps: number of steps that ran under a plan from their beginning.
        planning_stopped_because: which rank did not end as many steps as the others; None while the ranks agree.
        step_s: median duration of the recent steps, from one `step()` to the next; None until there are two. Seconds.
        resumed_from: file of the earlier run's plan that this run resumed from; None without one.
        not_resumed_because: why an earlier run's plan is not used; None if there is nothing to say.
        recorded_steps: number of steps recorded in detail.
        profiler: "operators" if steps are compared by their operators, "sizes" if by the sizes of inputs alone.
        profiler_off_because: why operators are not compared; None while they are.
        techniques: the report of each technique, by name.
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
        """Return the report of the technique of this name."""
        if name != "techniques" and name in self.techniques:
            return self.techniques[name]
        raise AttributeError(f"a report has no {name!r}", name=name, obj=self)

    def as_dict(self) -> dict[str, Any]:
        """Return all facts as one flat dict of JSON values; a session that is off has its stage alone.

        A technique's fields have its prefix, as in `arena_served`.
        """
        if self.stage == Stage.OFF.value:
            return {"stage": self.stage}
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "techniques"}
        for technique in self.techniques.values():
            found |= technique.as_dict()
        return found


def monitor_events(report: Report, samples: int) -> list[tuple[str, float, int]]:
    """Return the report's numbers as `Train/memplug/...` events for `engine.monitor.write_events`.

    Args:
        report: the report to convert.
        samples: number of samples trained so far, the events' position on the monitor's axis.

    Returns:
        (name, value, samples) for each number.
    """
    numbers = {
        key: value
        for key, value in report.as_dict().items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return [(f"Train/memplug/{key}", float(value), samples) for key, value in numbers.items()]
