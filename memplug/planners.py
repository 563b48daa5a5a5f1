"""The list of the layout planners.

The choices of the block and the commands, their help and the schema are made from it, and it imports none of them; the
table of memplug/arena/README.md repeats it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
"""Search and exact, and the others where the judge refuses what these find: see `memplug.arena.plan.auto`."""


@dataclass(frozen=True, slots=True)
class Planner:
    """One planner.

    Attributes:
        name: in `arena.planner` and `--planner`.
        does, suits: the table of memplug/arena/README.md.
        module: has `solve(problem, *, deadline_s, enough_bytes)`, which returns a `Solution` by `name` whenever
            `deadline_s` comes, on the clock of `time.monotonic`, and may end at a height of `enough_bytes`; None: at
            the lower bound. It need not know streams.
    """

    name: str
    does: str
    suits: str
    module: str

    def solve(self, problem: Any, *, deadline_s: float, enough_bytes: int | None) -> Any:
        """Offsets, for the judge to check."""
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
    """Every choice, "auto" first."""
    return (AUTO, *(planner.name for planner in PLANNERS))


def named(name: str) -> Planner:
    """The planner of that name, other than "auto"."""
    return next(planner for planner in PLANNERS if planner.name == name)


def listed(mark: str = "") -> str:
    """The choices but "auto" as words, each between marks: "search, exact, bilevel and spatiotemporal"."""
    *first, last = (f"{mark}{planner.name}{mark}" for planner in PLANNERS)
    return f"{', '.join(first)} and {last}"
