"""Judges decisions: checks that regions can run by them, and names each mistake in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from memplug.tokenwise.plan.decisions import Decision, Decisions, Setting


def mistakes_of(decisions: Decisions) -> Iterator[str]:
    """Yield the mistakes of decisions, in words."""
    for name, setting in decisions.settings.items():
        yield from (f"region {name}: {mistake}" for mistake in _of_region(setting))
        if setting.key not in decisions.solution.regions:
            yield f"region {name} has the key {setting.key!r}, for which the plan has no region"
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
        yield f"the fraction {setting.rows} of its rows to swap is not from 0 to 1"
    for amount in (setting.forward_bytes, setting.plain_bytes):
        if amount is not None and amount < 0:
            yield f"an amount of {amount} bytes is negative"
    for index, decision in (setting.plan or {}).items():
        if index < 0 or not _is_sound(decision):
            yield f"operator {index}: {decision.fraction} of {decision.operator} cannot be captured"


def _is_sound(decision: Decision) -> bool:
    return decision.fraction == 1 if decision.keep else 0 < decision.fraction <= 1
