"""Sums up the addresses of a plan in plain values, and puts these values into words."""

from __future__ import annotations

from typing import Any

import numpy as np

from memplug.arena.plan.part import AddressPlan, address_plan
from memplug.arena.plan.problem import BUFFER, Problem, Solution, fragmentation
from memplug.figures.words import Rows, bytes_by, held_rows
from memplug.plans.schema import MemoryPlan
from memplug.words import count, known, size


def has_addresses(plan: MemoryPlan) -> bool:
    """Return whether a plan has the arena's part."""
    return AddressPlan.name in plan.parts


def addresses_of(plan: MemoryPlan) -> AddressPlan:
    """Return the arena's part of a plan, or a part without requests if the plan has none."""
    none = Solution(offsets=np.empty(0, np.int64), height=0, planner="none", optimal=True)
    return AddressPlan.of(plan) or address_plan(Problem(buffers=np.empty(0, BUFFER)), none)


def heading(plan: AddressPlan) -> str:
    """Return the plan in one line, such as "2.59 GiB for 9,814 requests, efficiency 99.12%, by search"."""
    problem, solution = plan.problem, plan.solution
    words = f"{size(solution.height)} for {problem.requests:,} requests"
    return f"{words}, efficiency {_share(plan.efficiency)}, by {solution.planner}"


def summary(plan: MemoryPlan) -> dict[str, Any]:
    """Return the facts of the arena's part of a plan."""
    planned = addresses_of(plan)
    table = planned.problem.buffers
    reusable = [sum(end - start for start, end in group.spaces) for group in planned.dynamic]
    return {
        "has_addresses": has_addresses(plan),
        **addresses(planned),
        "largest_request_bytes": planned.problem.largest_bytes,
        "streams": len(np.unique(table["stream"])),
        "peak_bytes_by_phase": _held(planned, "phase"),
        "peak_bytes_by_layer": _held(planned, "layer"),
        "outliving_requests": int(table["outlives"].sum()),
        "outliving_bytes": int(table["size"][table["outlives"]].sum()),
        "room_bytes": planned.problem.room_bytes,
        "reusable_least_bytes": min(reusable, default=0),
        "reusable_most_bytes": max(reusable, default=0),
    }


def addresses(plan: AddressPlan) -> dict[str, Any]:
    """Return the facts of a plan's addresses that `memplug plan`, `show` and `diff` share."""
    bound, solution = plan.problem.lower_bound, plan.solution
    return {
        "height_bytes": int(solution.height),
        "live_peak_bytes": int(plan.predictions.live_peak_bytes),
        "efficiency": plan.efficiency,
        "lower_bound_bytes": bound,
        "requests": plan.problem.requests,
        "fragmentation": fragmentation(bound, int(solution.height)),
        "seconds": float(solution.seconds),
        "planner": solution.planner,
        "optimal": bool(solution.optimal),
        "timed_out": bool(solution.timed_out),
        "dynamic_groups": len(plan.dynamic),
        "dynamic_requests": sum(group.requests for group in plan.dynamic),
        "dynamic_peak_bytes": int(plan.predictions.dynamic_peak_bytes),
    }


def ending(facts: dict[str, Any]) -> str:
    """Say how good the plan is, from the keys `optimal` and `timed_out`."""
    if facts["optimal"]:
        return "nothing lower is possible"
    return "the best when the time ran out" if facts["timed_out"] else "not proven to be the lowest"


def rows(facts: dict[str, Any]) -> Rows:
    """Return the facts of `summary` as (name, value) in words."""
    if not facts["has_addresses"]:
        return [("addresses", "none: no arena served this run")]
    found = [
        ("arena", f"{size(facts['height_bytes'])} ({facts['height_bytes']:,} bytes)"),
        efficiency_row(facts),
        ("requests", f"{facts['requests']:,}, the largest {size(facts['largest_request_bytes'])}"),
        ("lower bound", f"{size(facts['lower_bound_bytes'])} ({facts['lower_bound_bytes']:,} bytes)"),
        ("fragmentation", f"{facts['fragmentation']:.4%}"),
        ("planner", f"{facts['planner']}, {ending(facts)}, in {facts['seconds']:.2f} s"),
        *held_rows("in use at the peak", facts["peak_bytes_by_phase"], facts["lower_bound_bytes"]),
        *held_rows("  by layer", facts["peak_bytes_by_layer"], facts["lower_bound_bytes"]),
        ("streams", str(facts["streams"])),
        ("outlive the step", f"{count(facts['outliving_requests'], 'request')}, {size(facts['outliving_bytes'])}"),
    ]
    if facts["dynamic_groups"]:
        room = f"{size(facts['reusable_least_bytes'])} to {size(facts['reusable_most_bytes'])} of the arena"
        groups = f"{count(facts['dynamic_requests'], 'request')} in {count(facts['dynamic_groups'], 'group')}"
        most = f"at most {size(facts['dynamic_peak_bytes'])} in use"
        found.append(("dynamic", f"{groups}, {most}; each group may reuse {room}"))
        found.append(("  room", f"at most {size(facts['room_bytes'])}" if facts["room_bytes"] else "none"))
    return found


def efficiency_row(facts: dict[str, Any]) -> tuple[str, str]:
    """Return the share of the arena that is in use at the recorded steps' peak, and the bytes, as (name, value)."""
    most = f"at most {size(facts['live_peak_bytes'])} in use at once"
    if facts["efficiency"] is None and facts["dynamic_groups"]:
        return "efficiency", f"unknown, since there is no room for dynamic requests; {most}"
    return "efficiency", f"{_share(facts['efficiency'])}, {most}"


def _share(efficiency: float | None) -> str:
    return known(efficiency, "{:.2%}".format)


def _held(plan: AddressPlan, column: str) -> dict[str, int]:
    """Return the bytes in use at the peak, by the phase or layer that requested them, largest first; {}: unknown."""
    problem = plan.problem
    if not (problem.phases if column == "phase" else problem.layers):
        return {}
    live = problem.buffers[problem.live_at_peak()]
    return dict(bytes_by(column, problem, live[f"lower_{column}"], live["size"]).most_common())
