"""A technique's report: fields for `session.report()`, lines for the note on an out-of-memory error, and a part of the
session's last line.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


def keyed(key: str) -> Any:
    """Returns a field of a report, None by default, that has this name in `as_dict` and no prefix."""
    return field(default=None, metadata={"key": key})


@dataclass(frozen=True, kw_only=True, slots=True)
class TechniqueReport:
    """The facts of one technique at one moment. A subclass has a field for each, with the default that is true of a
    technique that is not there.

    Attributes:
        prefix: in front of the fields' names in `as_dict`.
        advice: to a user whose device ran out of memory; "": none.
    """

    prefix: ClassVar[str] = ""
    advice: ClassVar[str] = ""

    @classmethod
    def absent(cls, why: str) -> TechniqueReport:
        """Returns the report of a technique that is off for a reason; "": of one that waits for the model to train."""
        return cls()

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields under names that are unique in the whole report: `arena_state` is `arena` there."""
        return {
            each.metadata.get("key") or (self.prefix + each.name).removesuffix("_state"): getattr(self, each.name)
            for each in fields(self)
        }

    def explain(self, peak_bytes: int | None) -> tuple[str, ...]:
        """Returns lines for the note on an out-of-memory error.

        Args:
            peak_bytes: largest allocation total of the device so far, None where the device does not count.
        """
        return ()

    def closing(self) -> str:
        """Returns its part of the session's last logged line; "": nothing to say."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerReport(TechniqueReport):
    """The report of a technique that each rank applies by itself.

    Attributes:
        state: what it is doing: "waiting" for a program that lasts, "off", or its own words.
        off_because: why training goes on without it; None while it may have a part in force.
    """

    state: str = "waiting"
    off_because: str | None = None

    @classmethod
    def absent(cls, why: str) -> FollowerReport:
        return cls(state="off" if why else "waiting", off_because=why or None)
