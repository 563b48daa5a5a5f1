"""The judge of a whole plan: of its program, and of its parts by the judges of their techniques."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memplug.plans.schema import MemoryPlan, PlanPart


def mistakes_of(plan: MemoryPlan, kinds: Iterable[type[PlanPart]]) -> Iterator[str]:
    """What is wrong with a plan, in sentences; nothing: it is accepted.

    Args:
        plan: any, as loaded.
        kinds: of the parts that are looked at; others are nobody's here, and do nothing.

    Raises:
        LayoutError: a part is something else.
    """
    program = plan.training.program if plan.training is not None else None
    if program is not None and not all(0 <= each < len(program.names) for each in program.operators or ()):
        yield "the program has operators without a name"
    for kind in kinds:
        yield from kind.mistakes_in(plan)
