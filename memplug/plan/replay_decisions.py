"""The judge of decisions: can regions be run by them at all? What is wrong, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from memplug.plan.decisions import Decision, Decisions, Setting
from memplug.plan.schema import Training


def mistakes(training: Training) -> Iterator[str]:
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


def mistakes_of(decisions: Decisions) -> Iterator[str]:
    """What is wrong with decisions."""
    for name, setting in decisions.settings.items():
        yield from (f"region {name}: {mistake}" for mistake in _of_region(setting))
        if setting.key not in decisions.solution.regions:
            yield f"region {name} runs by {setting.key!r}, which the plan says nothing of"
    solution = decisions.solution
    amounts = {
        "host_bytes": solution.host_bytes,
        "device_bytes": solution.device_bytes,
        "step_s": solution.step_s,
        "frame_bytes": decisions.frame_bytes,
        "peak_bytes": decisions.peak_bytes or 0,
    }
    yield from (f"{name} is {amount}" for name, amount in amounts.items() if not amount >= 0)


def _of_region(setting: Setting) -> Iterator[str]:
    if not 0 <= setting.rows <= 1:
        yield f"the fraction {setting.rows} of its rows is swapped"
    for amount in (setting.forward_bytes, setting.plain_bytes):
        if amount is not None and amount < 0:
            yield f"{amount} bytes"
    for index, decision in (setting.plan or {}).items():
        if index < 0 or not _is_sound(decision):
            yield f"operator {index}: {decision.fraction} of {decision.operator} is to be captured"


def _is_sound(decision: Decision) -> bool:
    return decision.fraction == 1 if decision.keep else 0 < decision.fraction <= 1
