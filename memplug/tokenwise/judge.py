"""The judge of decisions: can regions be run by them at all? What is wrong, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from memplug.tokenwise.plan.decisions import Decision, Decisions, Setting


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
