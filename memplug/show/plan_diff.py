"""What two memory plans have in common and what not, in one object of plain values, and that object in words."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from memplug.plan.layout.problem import Problem
from memplug.plan.schema import MemoryPlan
from memplug.show import decision_diff
from memplug.show.groups import OUTSIDE, phase_words
from memplug.show.layout_summary import addresses
from memplug.show.summary import count
from memplug.show.words import both, change, has_addresses, size

_LARGEST_AT_MOST = 5


class _Pairs(NamedTuple):
    """Requests of one plan, each with the one of the other that it is taken for: rows of the two, int64."""

    a: np.ndarray
    b: np.ndarray


def diff(a: MemoryPlan, b: MemoryPlan) -> dict[str, Any]:
    """What differs, for `memplug diff --json`: stable keys, units in names.

    Requests are taken for the same if they are asked for in the same phase and layer, on the same stream, with the
    same size, and are the first, the second, ... such ones there: one request more shifts only those of its size and
    place. Of what is left, those of the same phase, layer and stream are taken for each other in their order, resized;
    the others are only in one of the plans. Times differ between any two recordings, and are not compared.

    Args:
        a, b: Any two; of different programs most requests are only in one of them.
    """
    same, resized, only = _matched(a.problem, b.problem)
    moved = _Pairs(*(rows[a.solution.offsets[same.a] != b.solution.offsets[same.b]] for rows in same))
    sides = {"a": _facts(a), "b": _facts(b)}
    prints = asdict(a.problem.fingerprint), asdict(b.problem.fingerprint)
    return {
        **sides,
        "height_change_bytes": sides["b"]["height_bytes"] - sides["a"]["height_bytes"],
        "lower_bound_change_bytes": sides["b"]["lower_bound_bytes"] - sides["a"]["lower_bound_bytes"],
        "fragmentation_change": sides["b"]["fragmentation"] - sides["a"]["fragmentation"],
        "fingerprint": {
            name: {"a": prints[0][name], "b": prints[1][name]}
            for name in prints[0]
            if prints[0][name] != prints[1][name]
        },
        "same_dynamic_spaces": a.dynamic == b.dynamic,
        "same_requests": len(same.a),
        "same_bytes": _bytes_of(a, same.a),
        "moved_requests": len(moved.a),
        "moved_bytes": _bytes_of(a, moved.a),
        "moved_largest": _largest(a, b, moved),
        "resized_requests": len(resized.a),
        "resized_a_bytes": _bytes_of(a, resized.a),
        "resized_b_bytes": _bytes_of(b, resized.b),
        "resized_largest": _largest(a, b, resized),
        "only_in_a_requests": len(only.a),
        "only_in_a_bytes": _bytes_of(a, only.a),
        "only_in_a_largest": _largest(a, None, only),
        "only_in_b_requests": len(only.b),
        "only_in_b_bytes": _bytes_of(b, only.b),
        "only_in_b_largest": _largest(None, b, only),
        "decisions": decision_diff.diff(a, b),
    }


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What `diff` returned, as (name, value) in words."""
    a, b = facts["a"], facts["b"]
    compared = a["has_addresses"] and b["has_addresses"]
    return [
        *(_planned_rows(facts) if compared else [("addresses", _lacking(a, b))]),
        *_fingerprint_rows(facts["fingerprint"]),
        *(_request_rows(facts) if compared else []),
        *(decision_diff.rows(facts["decisions"]) if facts["decisions"] else []),
    ]


def _lacking(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Where there are addresses, of plans of which one has none."""
    for name, side in (("A", a), ("B", b)):
        if side["has_addresses"]:
            return f"only in {name}: {count(side['requests'], 'request')} in {size(side['height_bytes'])}"
    return "none in both"


def _planned_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    a, b = facts["a"], facts["b"]
    return [
        ("planner", both(_planner(a), _planner(b))),
        ("requests", both(f"{a['requests']:,}", f"{b['requests']:,}")),
        ("lower bound", _bytes(a, b, "lower_bound_bytes")),
        ("height", _bytes(a, b, "height_bytes")),
        ("fragmentation", both(f"{a['fragmentation']:.2%}", f"{b['fragmentation']:.2%}")),
        (
            "dynamic requests",
            both(*(f"{count(side['dynamic_groups'], 'group')}, {size(side['dynamic_peak_bytes'])}" for side in (a, b)))
            + ("" if facts["same_dynamic_spaces"] else "; what they may reuse differs"),
        ),
    ]


def _request_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for words, name in (
        ("the same in both", "same"),
        ("  at another offset", "moved"),
        ("resized", "resized"),
        ("only in A", "only_in_a"),
        ("only in B", "only_in_b"),
    ):
        if name == "resized":
            sizes = f"{size(facts['resized_a_bytes'])} in A, {size(facts['resized_b_bytes'])} in B"
        else:
            sizes = size(facts[f"{name}_bytes"])
        requests = facts[f"{name}_requests"]
        found.append((words, f"{count(requests, 'request')}, {sizes}" if requests else "none"))
        largest = facts.get(f"{name}_largest", [])
        found += [("    the largest" if i == 0 else "", _one(each)) for i, each in enumerate(largest)]
    return found


def _facts(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "fingerprint_digest": plan.problem.fingerprint.digest(),
        "has_addresses": has_addresses(plan),
        "requests_bytes": int(plan.problem.buffers["size"].sum()),
        **addresses(plan),
    }


def _bytes_of(plan: MemoryPlan, rows: np.ndarray) -> int:
    return int(plan.problem.buffers["size"][rows].sum())


def _matched(a: Problem, b: Problem) -> tuple[_Pairs, _Pairs, _Pairs]:
    """The same requests, the resized ones, and those that are only in one of the two, which are no pairs."""
    places, left = (_places(a), _places(b)), tuple(np.argsort(each.buffers["lower"], kind="stable") for each in (a, b))
    sizes = tuple(each.buffers["size"].tolist() for each in (a, b))
    same = _paired(left, tuple(list(zip(*side, strict=True)) for side in zip(places, sizes, strict=True)))
    left = tuple(rows[~np.isin(rows, taken)] for rows, taken in zip(left, same, strict=True))
    resized = _paired(left, places)
    only = (np.sort(rows[~np.isin(rows, taken)]) for rows, taken in zip(left, resized, strict=True))
    return same, resized, _Pairs(*only)


def _places(problem: Problem) -> list[tuple]:
    """What asks for each request: phase, layer and stream, comparable between plans."""
    phases, layers = (*problem.phases, None), (*problem.layers, None)  # -1: none
    columns = (problem.buffers[name].tolist() for name in ("lower_phase", "lower_layer", "stream"))
    return [(phases[phase], layers[layer], stream) for phase, layer, stream in zip(*columns, strict=True)]


def _paired(rows: tuple[np.ndarray, ...], keys: tuple[list[tuple], ...]) -> _Pairs:
    """The first of each key in A with the first of it in B, the second with the second, ...

    Args:
        rows: of A and of B, in the order in which they are counted.
        keys: of every row of A and of B.
    """
    waiting: dict[tuple, deque[int]] = defaultdict(deque)
    for row in rows[1].tolist():
        waiting[keys[1][row]].append(row)
    pairs = [(row, waiting[keys[0][row]].popleft()) for row in rows[0].tolist() if waiting[keys[0][row]]]
    return _Pairs(*np.array(pairs, np.int64).reshape(-1, 2).T)


def _largest(a: MemoryPlan | None, b: MemoryPlan | None, pairs: _Pairs) -> list[dict[str, Any]]:
    """The largest requests, with what each of the plans says of them."""
    sides = {name: (plan, its) for name, plan, its in (("a", a, pairs.a), ("b", b, pairs.b)) if plan is not None}
    largest = np.maximum.reduce([plan.problem.buffers["size"][its] for plan, its in sides.values()])
    found = []
    for index in np.argsort(-largest, kind="stable")[:_LARGEST_AT_MOST].tolist():
        plan, its = next(iter(sides.values()))
        buffer, problem = plan.problem.buffer(int(its[index])), plan.problem
        each: dict[str, Any] = {
            "phase": phase_words(problem.phases[buffer.lower_phase]) if buffer.lower_phase >= 0 else None,
            "layer": problem.layers[buffer.lower_layer].name if buffer.lower_layer >= 0 else None,
        }
        for name, (plan, its) in sides.items():
            row = int(its[index])
            each[f"{name}_id"] = plan.problem.ids[row].item()
            each[f"{name}_bytes"] = int(plan.problem.buffers["size"][row])
            each[f"{name}_offset_bytes"] = int(plan.solution.offsets[row])
        found.append(each)
    return found


def _planner(side: dict[str, Any]) -> str:
    proven = ", optimal" if side["optimal"] else ", out of time" if side["timed_out"] else ""
    return f"{side['planner']}{proven}"


def _bytes(a: dict[str, Any], b: dict[str, Any], name: str) -> str:
    if a[name] == b[name]:
        return f"{size(a[name])} ({a[name]:,} bytes) in both"
    return change(a[name], b[name], size)


def _fingerprint_rows(fingerprint: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    if not fingerprint:
        return [("recorded from", "the same program, on the same kind of machine")]
    return [
        (f"other {name}", f"{_value(sides['a'])} in A, {_value(sides['b'])} in B")
        for name, sides in fingerprint.items()
    ]


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(" ".join(each) if isinstance(each, list | tuple) else str(each) for each in value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value) or "unknown"


def _one(each: dict[str, Any]) -> str:
    side = "a" if "a_id" in each else "b"
    sizes = list(dict.fromkeys(size(each[f"{name}_bytes"]) for name in "ab" if f"{name}_id" in each))
    offsets = [f"{each[f'{name}_offset_bytes']:,}" for name in "ab" if f"{name}_id" in each]
    place = ", ".join(filter(None, [each["phase"], each["layer"] or OUTSIDE])) if each["phase"] else each["layer"]
    return (
        f"{' -> '.join(sizes)} at {' -> '.join(offsets)}: request {each[f'{side}_id']}{f', {place}' if place else ''}"
    )
