"""The judge of a whole plan: checks its program, and each part with the judge of its technique."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memplug.plans.schema import MemoryPlan, PlanPart

Judges = Mapping[type[PlanPart], Callable[[Any], Iterator[str]]]
"""The judge of each type of part; a judge yields the mistakes of a part as sentences."""


def mistakes_of(plan: MemoryPlan, judges: Judges) -> Iterator[str]:
    """Yield the mistakes of a plan as sentences; a plan without any is accepted.

    Args:
        plan: any loaded plan.
        judges: the judges of the parts to check.

    Raises:
        LayoutError: a part has the wrong type.
    """
    program = plan.training.program if plan.training is not None else None
    if program is not None and not all(0 <= each < len(program.names) for each in program.operators or ()):
        yield "the program has operators without a name"
    for kind, judge in judges.items():
        part = kind.of(plan)
        if part is not None:
            yield from judge(part)
