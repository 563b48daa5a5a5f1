"""The report of a technique: fields, lines for the note on an out-of-memory error, and words for the last line."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


def keyed(key: str) -> Any:
    """Return a report's field that defaults to None; `as_dict` names it `key`, without the prefix."""
    return field(default=None, metadata={"key": key})


@dataclass(frozen=True, kw_only=True, slots=True)
class TechniqueReport:
    """The facts of one technique at one moment.

    A subclass has a field for each fact; its default is the value for a technique that is absent.

    Attributes:
        prefix: prefix of the fields' names in `as_dict`.
        advice: advice for a user whose device ran out of memory; "" for none.
    """

    prefix: ClassVar[str] = ""
    advice: ClassVar[str] = ""

    @classmethod
    def absent(cls, why: str) -> TechniqueReport:
        """Return the report of a technique that is off because of `why`, or has yet to begin if `why` is ""."""
        return cls()

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, with names that are unique in the whole report: "arena_served" for `served`.

        The field `state` is named after the technique alone.
        """
        return {
            each.metadata.get("key") or (self.prefix + each.name).removesuffix("_state"): getattr(self, each.name)
            for each in fields(self)
        }

    def explain(self, peak_bytes: int | None) -> tuple[str, ...]:
        """Return the technique's lines for the note on an out-of-memory error.

        Args:
            peak_bytes: most bytes allocated on the device so far; None if the device does not count them.
        """
        return ()

    def closing(self) -> str:
        """Return the technique's part of the session's last line; "" if there is nothing to say."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerReport(TechniqueReport):
    """The report of a technique that each rank applies by itself.

    Attributes:
        state: "waiting" for a program that lasts, "off", or a state of the technique's own.
        off_because: why training goes on without it; None while it may have a part in force.
    """

    state: str = "waiting"
    off_because: str | None = None

    @classmethod
    def absent(cls, why: str) -> FollowerReport:
        """Return the report of a technique that is off because of `why`, or that waits if `why` is ""."""
        return cls(state="off" if why else "waiting", off_because=why or None)
