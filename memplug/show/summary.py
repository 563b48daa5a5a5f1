"""A trace as one object of plain values, and that object in words: what was recorded, and where memory peaks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from memplug.figures.groups import BEFORE
from memplug.figures.words import AT_MOST, bytes_by, held_rows
from memplug.profile.trace import Trace, earlier_frees, freed_elsewhere, still_live
from memplug.show.words import TraceMoment, moment
from memplug.words import count, size

_OPERATORS_AT_MOST = 10


def summary(trace: Trace) -> dict[str, Any]:
    """Return a trace's facts for `memplug show --json`: plain values under stable keys that name their units.

    Unknown values are None. Bytes are as requested, unrounded. `peak_bytes` is the largest memory in use by the
    recorded requests and by requests from before; `allocator_peak_bytes` is the allocator's own counter.
    """
    requests = trace.requests
    event, peak_bytes = trace.replayed_peak()
    live_at_end, elsewhere, dynamic = still_live(requests), freed_elsewhere(requests), requests["dynamic"]
    requested_bytes, dynamic_bytes = (int(requests["nbytes"][rows].sum()) for rows in (slice(None), dynamic))
    counts = np.bincount(trace.operators["name"], minlength=len(trace.names))
    most = sorted(range(len(counts)), key=lambda name: (-counts[name], trace.names[name]))[:_OPERATORS_AT_MOST]
    steps = range(len(trace.steps))
    return {
        "fingerprint": {"digest": trace.fingerprint.digest(), **asdict(trace.fingerprint)},
        "steps": len(steps),
        "step_s": [seconds or None for _, _, seconds in trace.steps],
        "operators": len(trace.operators),
        "operators_by_step": [step.stop - step.start for step in map(trace.step_operators, steps)],
        "requests": len(requests),
        "requested_bytes": requested_bytes,
        "largest_request_bytes": int(requests["nbytes"].max(initial=0)),
        "streams": len(np.unique(requests["stream"])),
        "base_bytes": trace.base_bytes,
        "peak_bytes": peak_bytes,
        "peak_at": asdict(moment(trace, event)),
        "peak_bytes_by_phase": _held(trace, event, "phase"),
        "peak_bytes_by_layer": _held(trace, event, "layer"),
        "allocator_peak_bytes": trace.peak_bytes or None,
        "replays_exactly": trace.replays_exactly(),
        "live_at_end_requests": int(live_at_end.sum()),
        "live_at_end_bytes": int(requests["nbytes"][live_at_end].sum()),
        "freed_by_another_thread_requests": int(elsewhere.sum()),
        "freed_by_another_thread_bytes": int(requests["nbytes"][elsewhere].sum()),
        "earlier_requests_freed": len(earlier_frees(trace.events)),
        "dynamic_requests": int(dynamic.sum()),
        "dynamic_bytes": dynamic_bytes,
        "dynamic_share": dynamic_bytes / requested_bytes if requested_bytes else 0.0,
        "top_operators": [{"name": trace.names[name], "count": int(counts[name])} for name in most if counts[name]],
    }


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the result of `summary` as (name, value) in words."""
    return [
        *recorded_rows(facts["fingerprint"]),
        ("steps", _steps_in_words(facts)),
        ("operators", _operators_in_words(facts)),
        ("requests", requests_in_words(facts)),
        (BEFORE, f"{size(facts['base_bytes'])} in use" if facts["base_bytes"] else "nothing in use, or unknown"),
        ("peak", f"{size(facts['peak_bytes'])} in use ({facts['peak_bytes']:,} bytes)"),
        ("  where", str(TraceMoment(**facts["peak_at"]))),
        ("  allocator's counter", _counter_in_words(facts)),
        *held_rows("  by phase", facts["peak_bytes_by_phase"], facts["peak_bytes"]),
        *held_rows("  by layer", facts["peak_bytes_by_layer"], facts["peak_bytes"]),
        ("live at the end", of_requests(facts, "live_at_end")),
        ("freed by another thread", of_requests(facts, "freed_by_another_thread")),
        ("freed, from before", count(facts["earlier_requests_freed"], "request")),
        ("in dynamic layers", f"{of_requests(facts, 'dynamic')}, {facts['dynamic_share']:.1%} of all bytes"),
        *_top_rows(facts["top_operators"]),
    ]


def _held(trace: Trace, event: int, column: str) -> dict[str, int]:
    """Return bytes in use after `event`, by the phase or layer that requested them, in decreasing order."""
    requests = trace.requests
    live = requests[(requests["malloc_event"] <= event) & (still_live(requests) | (requests["free_event"] > event))]
    held = bytes_by(column, trace, live[f"malloc_{column}"], live["nbytes"])
    in_use = int(trace.live_bytes[event]) if event >= 0 else trace.base_bytes
    # The rest is from before the recording. It has to be a difference, since not every free of such memory has a size.
    held[BEFORE] += in_use - sum(held.values())
    return {name: nbytes for name, nbytes in held.most_common() if nbytes}


def recorded_rows(fingerprint: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the recorded model, inputs, device and versions as (name, value) in words.

    Args:
        fingerprint: The fields of a fingerprint, and its digest.
    """
    parameters = f"{fingerprint['parameters']:,} parameters" if fingerprint["parameters"] else None
    rank = f"rank {fingerprint['rank']} of {fingerprint['world_size']}"
    found = {
        "model": ", ".join(filter(None, [fingerprint["model"] or "unknown", parameters])),
        "inputs": ", ".join(dict.fromkeys(fingerprint["inputs"])),
        "device": f"{fingerprint['device']}, {rank}" if fingerprint["device"] else "",
        "versions": ", ".join(f"{package} {version}" for package, version in fingerprint["versions"]),
        "fingerprint": fingerprint["digest"],
    }
    return [(name, value) for name, value in found.items() if value]


def _steps_in_words(facts: dict[str, Any]) -> str:
    seconds = [f"{value:.3f} s" for value in facts["step_s"] if value is not None]
    return f"{facts['steps']}: {_first_few(seconds)}" if seconds else f"{facts['steps']}, durations unknown"


def _operators_in_words(facts: dict[str, Any]) -> str:
    if not facts["operators"]:
        return "none recorded: the clock counts requests and releases instead"
    of_steps = [f"{operators:,}" for operators in facts["operators_by_step"]]
    return f"{facts['operators']:,}{', by step ' if of_steps else ''}{_first_few(of_steps)}"


def _first_few(words: list[str]) -> str:
    return ", ".join([*words[:AT_MOST], *(["..."] if len(words) > AT_MOST else [])])


def _counter_in_words(facts: dict[str, Any]) -> str:
    counted, peak = facts["allocator_peak_bytes"], facts["peak_bytes"]
    if counted is None:
        return "unknown, not recorded"
    if facts["replays_exactly"]:
        return "the same, to the byte"
    return f"{counted:,} bytes, {abs(counted - peak):,} {'more' if counted > peak else 'fewer'} than the requests give"


def requests_in_words(facts: dict[str, Any]) -> str:
    """Return the number of requests and their sizes in words."""
    return (
        f"{facts['requests']:,} for {size(facts['requested_bytes'])} in all, "
        f"the largest {size(facts['largest_request_bytes'])}, on {count(facts['streams'], 'stream')}"
    )


def of_requests(facts: dict[str, Any], name: str) -> str:
    """Return a number of requests and their bytes in words, from the keys that begin with `name`."""
    return f"{count(facts[f'{name}_requests'], 'request')}, {size(facts[f'{name}_bytes'])}"


def _top_rows(top: list[dict[str, Any]]) -> list[tuple[str, str]]:
    width = max((len(f"{each['count']:,}") for each in top), default=0)
    return [
        ("most frequent" if i == 0 else "", f"{each['count']:>{width},}  {each['name']}") for i, each in enumerate(top)
    ]
