"""The judge of a whole plan: of its program, and of its parts by the judges of their techniques."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memplug.plans.schema import MemoryPlan, PlanPart

Judges = Mapping[type[PlanPart], Callable[[Any], Iterator[str]]]
"""The judge of each kind of part: yields what is wrong with one, in sentences."""


def mistakes_of(plan: MemoryPlan, judges: Judges) -> Iterator[str]:
    """Yields what is wrong with a plan, in sentences; nothing: it is accepted.

    Args:
        plan: any, as loaded.
        judges: of the parts that are looked at.

    Raises:
        LayoutError: a part is something else.
    """
    program = plan.training.program if plan.training is not None else None
    if program is not None and not all(0 <= each < len(program.names) for each in program.operators or ()):
        yield "the program has operators without a name"
    for kind, judge in judges.items():
        part = kind.of(plan)
        if part is not None:
            yield from judge(part)
