"""Compares the addresses of two plans, and says in words how they differ."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from memplug.arena.picture.summary import addresses, addresses_of, has_addresses
from memplug.arena.plan.part import AddressPlan
from memplug.arena.plan.problem import Problem
from memplug.figures.groups import OUTSIDE, phase_words
from memplug.figures.words import Rows, both, change
from memplug.plans.schema import MemoryPlan
from memplug.words import count, known, size

_LARGEST_AT_MOST = 5


class _Pairs(NamedTuple):
    """Rows of plan A's problem and of plan B's, int64. If the rows have partners, a[i] and b[i] are a pair."""

    a: np.ndarray
    b: np.ndarray


def side(plan: MemoryPlan) -> dict[str, Any]:
    """Return the facts of one of two plans in a comparison."""
    planned = addresses_of(plan)
    return {
        "has_addresses": has_addresses(plan),
        "requests_bytes": int(planned.problem.buffers["size"].sum()),
        **addresses(planned),
    }


def diff(a: MemoryPlan, b: MemoryPlan) -> dict[str, Any]:
    """Return the differences of two plans.

    Requests of one phase, layer, stream and size are numbered. Two requests count as the same if they agree in these
    four and in the number, so an additional request shifts only requests of its own size and place. The remaining
    requests of a phase, layer and stream are paired in their order, and count as resized. All other requests are only
    in one of the plans. Times are not compared, since they differ between any two recordings. Plans of different
    programs have few requests in common.
    """
    mine, its = addresses_of(a), addresses_of(b)
    same, resized, only = _matched(mine.problem, its.problem)
    moved = _Pairs(*(rows[mine.solution.offsets[same.a] != its.solution.offsets[same.b]] for rows in same))
    before, after = addresses(mine), addresses(its)
    return {
        "height_change_bytes": after["height_bytes"] - before["height_bytes"],
        "lower_bound_change_bytes": after["lower_bound_bytes"] - before["lower_bound_bytes"],
        "fragmentation_change": after["fragmentation"] - before["fragmentation"],
        "same_dynamic_spaces": mine.dynamic == its.dynamic,
        "same_requests": len(same.a),
        "same_bytes": _bytes_of(mine, same.a),
        "moved_requests": len(moved.a),
        "moved_bytes": _bytes_of(mine, moved.a),
        "moved_largest": _largest(mine, its, moved),
        "resized_requests": len(resized.a),
        "resized_a_bytes": _bytes_of(mine, resized.a),
        "resized_b_bytes": _bytes_of(its, resized.b),
        "resized_largest": _largest(mine, its, resized),
        "only_in_a_requests": len(only.a),
        "only_in_a_bytes": _bytes_of(mine, only.a),
        "only_in_a_largest": _largest(mine, None, only),
        "only_in_b_requests": len(only.b),
        "only_in_b_bytes": _bytes_of(its, only.b),
        "only_in_b_largest": _largest(None, its, only),
    }


def rows(facts: dict[str, Any]) -> Rows:
    """Return the facts of `side` and `diff` as (name, value) in words."""
    a, b = facts["a"], facts["b"]
    if a["has_addresses"] and b["has_addresses"]:
        return [*_planned_rows(facts), *_request_rows(facts)]
    return [("addresses", _lacking(a, b))]


def _lacking(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Return words for two plans of which at most one has addresses."""
    for name, side in (("A", a), ("B", b)):
        if side["has_addresses"]:
            return f"only in {name}: {count(side['requests'], 'request')} in {size(side['height_bytes'])}"
    return "none in both"


def _planned_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    def of_both(words: Callable[[dict[str, Any]], str]) -> str:
        return both(words(facts["a"]), words(facts["b"]))

    def nbytes(name: str) -> str:
        a, b = facts["a"][name], facts["b"][name]
        return change(a, b, size) if a != b else f"{size(a)} ({a:,} bytes) in both"

    dynamic = of_both(lambda side: f"{count(side['dynamic_groups'], 'group')}, {size(side['dynamic_peak_bytes'])}")
    return [
        ("planner", of_both(_planner)),
        ("height", nbytes("height_bytes")),
        ("in use at the peak", nbytes("live_peak_bytes")),
        ("lower bound", nbytes("lower_bound_bytes")),
        ("efficiency", of_both(lambda side: known(side["efficiency"], "{:.2%}".format))),
        ("requests", of_both(lambda side: f"{side['requests']:,}")),
        ("fragmentation", of_both(lambda side: f"{side['fragmentation']:.2%}")),
        ("dynamic requests", dynamic + ("" if facts["same_dynamic_spaces"] else "; reusable space differs")),
    ]


def _planner(side: dict[str, Any]) -> str:
    proven = ", optimal" if side["optimal"] else ", out of time" if side["timed_out"] else ""
    return f"{side['planner']}{proven}"


def _request_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for words, name in (
        ("the same in both", "same"),
        ("  at another offset", "moved"),
        ("resized", "resized"),
        ("only in A", "only_in_a"),
        ("only in B", "only_in_b"),
    ):
        requests = facts[f"{name}_requests"]
        if name == "resized":
            sizes = f"{size(facts['resized_a_bytes'])} in A, {size(facts['resized_b_bytes'])} in B"
        else:
            sizes = size(facts[f"{name}_bytes"])
        found.append((words, f"{count(requests, 'request')}, {sizes}" if requests else "none"))
        largest = facts.get(f"{name}_largest", [])
        found += [("    the largest" if i == 0 else "", _one(each)) for i, each in enumerate(largest)]
    return found


def _bytes_of(plan: AddressPlan, rows: np.ndarray) -> int:
    return int(plan.problem.buffers["size"][rows].sum())


def _matched(a: Problem, b: Problem) -> tuple[_Pairs, _Pairs, _Pairs]:
    """Return the pairs of same requests, the pairs of resized requests, and the requests without a partner."""
    places, left = (_places(a), _places(b)), tuple(np.argsort(each.buffers["lower"], kind="stable") for each in (a, b))
    sizes = tuple(each.buffers["size"].tolist() for each in (a, b))
    same = _paired(left, tuple(list(zip(*side, strict=True)) for side in zip(places, sizes, strict=True)))
    left = tuple(rows[~np.isin(rows, taken)] for rows, taken in zip(left, same, strict=True))
    resized = _paired(left, places)
    only = (np.sort(rows[~np.isin(rows, taken)]) for rows, taken in zip(left, resized, strict=True))
    return same, resized, _Pairs(*only)


def _places(problem: Problem) -> list[tuple]:
    """Return the phase, layer and stream of each request, as values that two plans have in common."""
    phases, layers = (*problem.phases, None), (*problem.layers, None)  # the index -1 gives None
    columns = (problem.buffers[name].tolist() for name in ("lower_phase", "lower_layer", "stream"))
    return [(phases[phase], layers[layer], stream) for phase, layer, stream in zip(*columns, strict=True)]


def _paired(rows: tuple[np.ndarray, ...], keys: tuple[list[tuple], ...]) -> _Pairs:
    """Pair rows of A and B with equal keys: the first with the first, the second with the second, and so on.

    `rows` has rows of A and rows of B, each in the order in which to pair them. `keys` has a key for each row of A's
    problem and for each row of B's.
    """
    waiting: dict[tuple, deque[int]] = defaultdict(deque)
    for row in rows[1].tolist():
        waiting[keys[1][row]].append(row)
    pairs = [(row, waiting[keys[0][row]].popleft()) for row in rows[0].tolist() if waiting[keys[0][row]]]
    return _Pairs(*np.array(pairs, np.int64).reshape(-1, 2).T)


def _largest(a: AddressPlan | None, b: AddressPlan | None, pairs: _Pairs) -> list[dict[str, Any]]:
    """Return the largest requests, with their facts in each plan that has them."""
    sides = [(name, plan, its) for name, plan, its in zip("ab", (a, b), pairs, strict=True) if plan is not None]
    largest = np.max([plan.problem.buffers["size"][its] for _, plan, its in sides], axis=0)
    found = []
    for index in np.argsort(-largest, kind="stable")[:_LARGEST_AT_MOST].tolist():
        each: dict[str, Any] = {}
        for name, plan, its in sides:
            problem, row = plan.problem, int(its[index])
            buffer = problem.buffer(row)
            each |= {
                "phase": phase_words(problem.phases[buffer.lower_phase]) if buffer.lower_phase >= 0 else None,
                "layer": problem.layers[buffer.lower_layer].name if buffer.lower_layer >= 0 else None,
                f"{name}_id": problem.ids[row].item(),
                f"{name}_bytes": buffer.size,
                f"{name}_offset_bytes": int(plan.solution.offsets[row]),
            }
        found.append(each)
    return found


def _one(each: dict[str, Any]) -> str:
    sides = [side for side in "ab" if f"{side}_id" in each]
    sizes = " -> ".join(dict.fromkeys(size(each[f"{side}_bytes"]) for side in sides))
    offsets = " -> ".join(f"{each[f'{side}_offset_bytes']:,}" for side in sides)
    place = ", ".join(filter(None, [each["phase"], each["layer"] or (OUTSIDE if each["phase"] else None)]))
    return f"{sizes} at {offsets}: request {each[f'{sides[0]}_id']}{f', {place}' if place else ''}"
