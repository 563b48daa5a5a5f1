"""The last line that a session logs, when it is detached or the process ends: numbers of steps, plans and bytes."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from memplug.session.report import Report
from memplug.session.technique import AgreedTechnique


class Attached(Protocol):
    """The members of `memplug.session.attached.AttachedModel` that the last line needs."""

    steps_are_marked: bool

    @property
    def agreed(self) -> AgreedTechnique[Any]:
        """Return the technique whose decisions all ranks agree on."""

    @property
    def warmup_steps(self) -> int:
        """Return the number of further steps after which memplug plans for a program that it has seen once."""

    @property
    def history(self) -> list[tuple[int, Any, int, str]]:
        """Return the changes of stage or program."""

    def report(self) -> Report:
        """Return what the session did so far."""

    def tell(self, text: str) -> None:
        """Log one line for the user."""


def line(session: Attached) -> str:
    """Return the last line, such as "after 40 steps; 33 of them planned; 1.21 GiB swapped"."""
    report = session.report()
    parts = [f"after {report.steps:,} steps", _planned(session, report)]
    parts += [each.closing() for each in report.techniques.values()]
    return "; ".join(filter(None, parts))


def at_exit(session: Attached) -> Callable[[], None]:
    """Have the last line logged when the process ends; return a function that cancels this, for `detach`."""
    reference = weakref.ref(session)

    def close() -> None:
        found = reference()
        if found is not None:
            found.tell(line(found))

    atexit.register(close)
    weakref.finalize(session, atexit.unregister, close).atexit = False
    return lambda: atexit.unregister(close)


def _planned(session: Attached, report: Report) -> str:
    if not session.agreed.plans:
        return ""
    if report.replans or report.planned_steps:
        return f"{report.planned_steps:,} of them planned"
    return f"nothing was planned: {_why_unplanned(session, report)}"


def _why_unplanned(session: Attached, report: Report) -> str:
    if not session.agreed.has_run:
        return "no region ran forward with gradients"
    if not report.steps:
        return "no step ended" if session.steps_are_marked else "no step ended (`session.step()` marks its end)"
    if session.history:
        return session.history[-1][-1]
    earliest = session.warmup_steps + 2
    return f"a plan takes at least {earliest} steps of one program"
