"""The judge of a whole plan: of its addresses, of its decisions, and whether it is one of this run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from memplug.arena.judge import Fault, Finding, judge_addresses, more, shown
from memplug.arena.plan.problem import Problem
from memplug.plans.schema import MemoryPlan, Training
from memplug.tokenwise.judge import mistakes_of


def judge_plan(
    plan: MemoryPlan,
    problem: Problem | None = None,
    capacity_bytes: int | None = None,
) -> tuple[Finding, ...]:
    """What is wrong with a plan: its solution, predictions, dynamic spaces and decisions; nothing: it is accepted.

    Args:
        plan: Any, as loaded.
        problem: Of this run; the plan has to be of the same program on the same kind of machine, and of its buffers.
        capacity_bytes: See `memplug.arena.judge.judge`.
    """
    found = list(judge_addresses(plan, capacity_bytes))
    if any(finding.code in (Fault.NO_OFFSETS, Fault.LEFT_OUT) for finding in found):
        return tuple(found)
    if plan.training is not None:
        found += [Finding(code=Fault.DECISION, message=mistake) for mistake in _mistakes(plan.training)]
    if problem is not None:
        found += _differences(plan.problem, problem)
    return tuple(found)


def _mistakes(training: Training) -> Iterator[str]:
    """What is wrong with what a run would go on from; nothing: it is accepted.

    Every decision is for an operator of the tape, of a fraction in (0, 1], all of it where it is kept; every region has
    a part of the plan; no amount is negative; and the program's operators have names.
    """
    program, decisions = training.program, training.decisions
    if (program is None) != (decisions is None):
        yield "there are decisions without a program, or a program without decisions"
    if program is not None and not all(0 <= each < len(program.names) for each in program.operators or ()):
        yield "the program has operators without a name"
    if decisions is not None:
        yield from mistakes_of(decisions)


def _differences(planned: Problem, run: Problem) -> Iterator[Finding]:
    for field in dataclasses.fields(planned.fingerprint):
        of_plan, of_run = getattr(planned.fingerprint, field.name), getattr(run.fingerprint, field.name)
        if of_plan != of_run:
            message = f"the plan is of {field.name} {shown(of_plan)}, and this run has {shown(of_run)}"
            yield Finding(code=Fault.OTHER_RUN, message=message)
    for name in ("phases", "layers"):
        if getattr(planned, name) != getattr(run, name):
            yield Finding(code=Fault.OTHER_RUN, message=f"the plan is of other {name} than this run has")
    if len(planned.buffers) != len(run.buffers):
        message = f"the plan is of {len(planned.buffers)} buffers, and this run has {len(run.buffers)}"
        yield Finding(code=Fault.OTHER_BUFFERS, message=message)
        return
    columns = {name: (planned.buffers[name], run.buffers[name]) for name in planned.buffers.dtype.names}
    for name, (of_plan, of_run) in {"id": (planned.ids, run.ids), **columns}.items():
        rows = np.flatnonzero(of_plan != of_run)
        if len(rows):
            row = int(rows[0])
            message = f"buffer {run.ids[row]} has {name} {of_plan[row]} in the plan and {of_run[row]} in this run"
            yield Finding(code=Fault.OTHER_BUFFERS, message=message + more(len(rows)), rows=(row,))
    if not np.array_equal(planned.orderings, run.orderings):
        message = "the plan is of other orderings of streams than this run has"
        yield Finding(code=Fault.OTHER_BUFFERS, message=message)
