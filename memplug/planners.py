"""The list of layout planners; imports none of them.

The values of `arena.planner` and `--planner`, their help texts and the JSON schema come from this list; the table in
memplug/arena/README.md repeats it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
"""Runs search and exact; if the judge rejects their results, the other planners (`memplug.arena.plan.auto`)."""


@dataclass(frozen=True, slots=True)
class Planner:
    """One layout planner.

    Attributes:
        name: The planner's name in `arena.planner` and `--planner`.
        does: The planner's method, as in the table of memplug/arena/README.md.
        suits: The inputs that the planner suits, as in that table.
        module: Name of the module with `solve(problem, *, deadline_s, enough_bytes)`. This function returns a
            `Solution` whose `planner` is `name`. It ends at `deadline_s`, but not before it has a solution. It may end
            earlier, at a height of `enough_bytes` (None: the problem's lower bound). It may take all requests to be
            on one stream, since its caller reduces the problem to one.
    """

    name: str
    does: str
    suits: str
    module: str

    def solve(self, problem: Any, *, deadline_s: float, enough_bytes: int | None) -> Any:
        """Return the requests' offsets as a `Solution`, not yet judged.

        Args:
            problem: The requests to place.
            deadline_s: When to end, on the clock of `time.monotonic`; a first solution may take longer.
            enough_bytes: Height at which the planner may stop; None: the lower bound.
        """
        return importlib.import_module(self.module).solve(problem, deadline_s=deadline_s, enough_bytes=enough_bytes)


PLANNERS: tuple[Planner, ...] = (
    Planner(
        "search",
        "greedy placement in many orders, in C++",
        "everything large: a quarter of a million requests in a second",
        "memplug.arena.plan.search",
    ),
    Planner(
        "exact",
        "tree search from the lower bound up, proves the optimum",
        "up to some 1,000 buffers of any kind",
        "memplug.arena.plan.exact",
    ),
    Planner(
        "bilevel",
        "MEMO: layers are found, placed once, and used again",
        "recomputation: the same addresses in every layer",
        "memplug.arena.plan.bilevel",
    ),
    Planner(
        "spatiotemporal",
        "STWeaver: groups by phase and by size",
        "steps whose requests fall into phases and few sizes",
        "memplug.arena.plan.spatiotemporal",
    ),
)


def names() -> tuple[str, ...]:
    """Return all choices, "auto" first."""
    return (AUTO, *(planner.name for planner in PLANNERS))


def named(name: str) -> Planner:
    """Return the planner of this name, which must not be "auto"."""
    return next(planner for planner in PLANNERS if planner.name == name)


def listed(mark: str = "") -> str:
    """Return the names as text, `mark` around each; without marks "search, exact, bilevel and spatiotemporal"."""
    *first, last = (f"{mark}{planner.name}{mark}" for planner in PLANNERS)
    return f"{', '.join(first)} and {last}"
