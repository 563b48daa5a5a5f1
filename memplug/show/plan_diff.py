"""What two memory plans have in common and what not, in one object of plain values, and that object in words."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from memplug.plan.layout.problem import Problem, fragmentation
from memplug.plan.schema import MemoryPlan
from memplug.show import decision_diff
from memplug.show.groups import OUTSIDE, phase_words
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
    sizes = a.problem.buffers["size"], b.problem.buffers["size"]
    facts = {"a": _facts(a), "b": _facts(b)}
    prints = asdict(a.problem.fingerprint), asdict(b.problem.fingerprint)
    return {
        **facts,
        "height_change_bytes": facts["b"]["height_bytes"] - facts["a"]["height_bytes"],
        "lower_bound_change_bytes": facts["b"]["lower_bound_bytes"] - facts["a"]["lower_bound_bytes"],
        "fragmentation_change": facts["b"]["fragmentation"] - facts["a"]["fragmentation"],
        "fingerprint": {
            name: {"a": prints[0][name], "b": prints[1][name]}
            for name in prints[0]
            if prints[0][name] != prints[1][name]
        },
        "same_dynamic_spaces": a.dynamic == b.dynamic,
        "same_requests": len(same.a),
        "same_bytes": int(sizes[0][same.a].sum()),
        "moved_requests": len(moved.a),
        "moved_bytes": int(sizes[0][moved.a].sum()),
        "moved_largest": _largest(a, b, moved),
        "resized_requests": len(resized.a),
        "resized_a_bytes": int(sizes[0][resized.a].sum()),
        "resized_b_bytes": int(sizes[1][resized.b].sum()),
        "resized_largest": _largest(a, b, resized),
        "only_in_a_requests": len(only.a),
        "only_in_a_bytes": int(sizes[0][only.a].sum()),
        "only_in_a_largest": _largest(a, None, only),
        "only_in_b_requests": len(only.b),
        "only_in_b_bytes": int(sizes[1][only.b].sum()),
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
            return f"only in {name}: {_count(side['requests'], 'request')} in {size(side['height_bytes'])}"
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
            both(*(f"{_count(side['dynamic_groups'], 'group')}, {size(side['dynamic_peak_bytes'])}" for side in (a, b)))
            + ("" if facts["same_dynamic_spaces"] else "; what they may reuse differs"),
        ),
    ]


def _request_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("the same in both", _requests(facts["same_requests"], facts["same_bytes"])),
        ("  at another offset", _requests(facts["moved_requests"], facts["moved_bytes"])),
        *_largest_rows(facts["moved_largest"]),
        ("resized", _resized(facts)),
        *_largest_rows(facts["resized_largest"]),
        ("only in A", _requests(facts["only_in_a_requests"], facts["only_in_a_bytes"])),
        *_largest_rows(facts["only_in_a_largest"]),
        ("only in B", _requests(facts["only_in_b_requests"], facts["only_in_b_bytes"])),
        *_largest_rows(facts["only_in_b_largest"]),
    ]


def _facts(plan: MemoryPlan) -> dict[str, Any]:
    problem, solution = plan.problem, plan.solution
    return {
        "fingerprint_digest": problem.fingerprint.digest(),
        "has_addresses": has_addresses(plan),
        "planner": solution.planner,
        "optimal": bool(solution.optimal),
        "timed_out": bool(solution.timed_out),
        "seconds": float(solution.seconds),
        "requests": len(problem),
        "requests_bytes": int(problem.buffers["size"].sum()),
        "lower_bound_bytes": problem.lower_bound,
        "height_bytes": int(solution.height),
        "fragmentation": fragmentation(problem.lower_bound, int(solution.height)),
        "dynamic_groups": len(plan.dynamic),
        "dynamic_peak_bytes": int(plan.predictions.dynamic_peak_bytes),
    }


def _matched(a: Problem, b: Problem) -> tuple[_Pairs, _Pairs, _Pairs]:
    """The same requests, the resized ones, and those that are only in one of the two, which are no pairs."""
    phases, layers = _common(a.phases, b.phases), _common(a.layers, b.layers)
    count = len(a)

    def column(name: str) -> np.ndarray:
        return np.concatenate([a.buffers[name], b.buffers[name]])

    phase = np.concatenate([index[table.buffers["lower_phase"]] for index, table in zip(phases, (a, b), strict=True)])
    layer = np.concatenate([index[table.buffers["lower_layer"]] for index, table in zip(layers, (a, b), strict=True)])
    place = _codes(phase, layer, column("stream"))
    order = np.lexsort((column("lower"), np.arange(len(place)) >= count))  # by time, in each plan
    same = _paired(_codes(place, column("size")), order, count)
    left = np.ones(len(place), bool)
    left[same.a] = left[same.b + count] = False
    resized = _paired(place, order[left[order]], count)
    left[resized.a] = left[resized.b + count] = False
    return same, resized, _Pairs(np.flatnonzero(left[:count]), np.flatnonzero(left[count:]))


def _common(a: tuple, b: tuple) -> tuple[np.ndarray, np.ndarray]:
    """For each of two tables, where its entries are in one of both; the last one is for -1, none."""
    numbers: dict[Any, int] = {}
    return tuple(np.array([*(numbers.setdefault(entry, len(numbers)) for entry in table), -1]) for table in (a, b))


def _codes(*columns: np.ndarray) -> np.ndarray:
    """int64[n], equal where all columns are, and below n."""
    codes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, of_values = np.unique(column, return_inverse=True)
        codes = np.unique(codes * len(values) + of_values, return_inverse=True)[1]
    return codes


def _paired(codes: np.ndarray, order: np.ndarray, count: int) -> _Pairs:
    """The first of each code in A with the first of it in B, the second with the second, ...

    Args:
        codes: int64, of the rows of A and then of B.
        order: which of these rows, in the order in which they are counted.
        count: of the rows of A.
    """
    sides = [order[order < count], order[order >= count]]
    keys = []
    for side in sides:
        by_code = np.argsort(codes[side], kind="stable")
        ordered = codes[side][by_code]
        number = np.empty(len(side), np.int64)
        number[by_code] = np.arange(len(side)) - np.searchsorted(ordered, ordered, "left")
        keys.append(codes[side] * (len(codes) + 1) + number)
    _, in_a, in_b = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    return _Pairs(sides[0][in_a], sides[1][in_b] - count)


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


def _resized(facts: dict[str, Any]) -> str:
    if not facts["resized_requests"]:
        return "none"
    sizes = f"{size(facts['resized_a_bytes'])} in A, {size(facts['resized_b_bytes'])} in B"
    return f"{_count(facts['resized_requests'], 'request')}, {sizes}"


def _requests(count: int, nbytes: int) -> str:
    return f"{_count(count, 'request')}, {size(nbytes)}" if count else "none"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _largest_rows(largest: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [("    the largest" if i == 0 else "", _one(each)) for i, each in enumerate(largest)]


def _one(each: dict[str, Any]) -> str:
    side = "a" if "a_id" in each else "b"
    sizes = list(dict.fromkeys(size(each[f"{name}_bytes"]) for name in "ab" if f"{name}_id" in each))
    offsets = [f"{each[f'{name}_offset_bytes']:,}" for name in "ab" if f"{name}_id" in each]
    place = ", ".join(filter(None, [each["phase"], each["layer"] or OUTSIDE])) if each["phase"] else each["layer"]
    return (
        f"{' -> '.join(sizes)} at {' -> '.join(offsets)}: request {each[f'{side}_id']}{f', {place}' if place else ''}"
    )
