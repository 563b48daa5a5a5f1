"""A snapshot of torch's allocator as plain values and in words, alone or compared with a plan for its requests."""

from __future__ import annotations

from typing import Any

from memplug.figures.groups import BEFORE, OUTSIDE
from memplug.figures.words import Rows, held_rows
from memplug.profile.allocator_history import History
from memplug.show import summary as of_trace
from memplug.words import count, size

_UNKNOWN_CODE = "code that is not Python's, or unknown"
_OF_TRACES = (
    "fingerprint",
    "steps",
    "step_s",
    "operators",
    "operators_by_step",
    "peak_bytes_by_phase",
    "top_operators",
)
"""Keys of a trace's summary that a snapshot cannot fill."""


def summary(history: History) -> dict[str, Any]:
    """Return a snapshot's facts for `memplug show --json`; facts that a trace also has are under the same keys."""
    found = of_trace.summary(history.trace)
    by_code = {_UNKNOWN_CODE if name == OUTSIDE else name: held for name, held in found["peak_bytes_by_layer"].items()}
    return {
        "device": history.device,
        "devices": list(history.devices),
        "events": len(history.trace.events),
        **{key: value for key, value in found.items() if key not in (*_OF_TRACES, "peak_bytes_by_layer")},
        "peak_bytes_by_code": by_code,
        **_of_torch(history),
    }


def rows(facts: dict[str, Any]) -> Rows:
    """Return the result of `summary` as (name, value) in words."""
    others = [str(number) for number in facts["devices"] if number != facts["device"]]
    return [
        ("device", f"{facts['device']}" + (f", of those with events; others: {', '.join(others)}" if others else "")),
        ("requests", of_trace.requests_in_words(facts)),
        (BEFORE, f"{size(facts['base_bytes'])} in use" if facts["base_bytes"] else "nothing in use"),
        ("peak", f"{size(facts['peak_bytes'])} in use ({facts['peak_bytes']:,} bytes)"),
        *held_rows("  by code", facts["peak_bytes_by_code"], facts["peak_bytes"]),
        ("in use at the end", of_trace.of_requests(facts, "live_at_end")),
        ("freed, from before", count(facts["earlier_requests_freed"], "request")),
        *_torch_rows(facts, facts["peak_bytes"]),
    ]


def beside(history: History, needed_bytes: int) -> dict[str, Any]:
    """Return the memory that torch's allocator reserved for the requests of a plan: keys for `memplug plan --json`.

    Args:
        history: The allocator's history, with these requests.
        needed_bytes: The most bytes that these requests use at a time.
    """
    facts = _of_torch(history)
    reserved = facts["torch_reserved_bytes"]
    return {**facts, "torch_fragmentation": None if reserved is None else _fragmentation(needed_bytes, reserved)}


def rows_beside(facts: dict[str, Any]) -> Rows:
    """Return the result of `beside` as (name, value) in words.

    Args:
        facts: The facts of the plan, merged with the result of `beside`.
    """
    return _torch_rows(facts, facts["lower_bound_bytes"], facts["height_bytes"])


def _of_torch(history: History) -> dict[str, Any]:
    return {
        "torch_reserved_bytes": history.reserved_bytes,
        "torch_out_of_memory": history.out_of_memory,
        "missing_events": history.missing,
    }


def _torch_rows(facts: dict[str, Any], needed: int, height: int | None = None) -> Rows:
    reserved, failed = facts["torch_reserved_bytes"], facts["torch_out_of_memory"]
    if reserved is None:
        found = [("torch reserved", "unknown: the snapshot has no segments of torch, or memplug wrote it")]
    else:
        words = f"{size(reserved)} at most, {_fragmentation(needed, reserved):.4%} fragmentation"
        if height is not None:
            words += f": {size(abs(reserved - height))} {'more' if reserved >= height else 'less'} than this arena"
        found = [("torch reserved", words)]
    if failed:
        found.append(("out of memory", count(failed, "request")))
    if facts["missing_events"]:
        found.append(("history", f"has gaps: {count(facts['missing_events'], 'event')} must be missing"))
    return found


def _fragmentation(needed: int, reserved: int) -> float:
    """Return the share of torch's reserved memory that is unused at the peak."""
    return max(0.0, 1 - needed / reserved) if reserved else 0.0
