"""Finds the requests of a step that depend on data: those that other steps of the same program make otherwise.

A request is dynamic if another recorded step asks for other bytes at its place and turn, or does not ask at all
(STWeaver, section 5.2, calls the requests of experts dynamic; here each request is judged by what it did). All other
requests have the same size in each step, whatever module makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

import numpy as np

from memplug.profile.records import Layer, Pass
from memplug.profile.requests import micro_batches
from memplug.profile.scaling import BOUNDED, Fit, Scaling
from memplug.profile.trace import Trace, without_gradients
from memplug.sizes import BLOCK_BYTES, rounded_up

FEW = 0.1
"""Two steps differ in few of a place's requests if at most this share of them is in no common run."""
SHORT = 32
"""A place with more requests, of which many differ, is taken for a loop."""
MOST = 0.5
"""A place whose sizes follow from no inputs has more than this share of requests of which none shows how."""
MOST_PAIRS = 2**22
"""The longest common runs of a place are searched for among at most so many pairs of requests."""

_Place = tuple[Pass, int, Layer | None, int]
_Asked = tuple[str, int]  # operator, bytes


def observed(step: Trace, others: Sequence[Trace]) -> tuple[Trace, list[Trace]]:
    """Return the step and the others with their dynamic requests marked.

    All of them have the same requests that are not dynamic, but for those of forwards without gradients, which a step
    may have or not, and which are never marked. If the inputs of the steps have the same dimensions, of other sizes,
    the same requests may have other bytes, which the step's `scaling` gives.

    Args:
        step: one recorded step.
        others: recorded steps of the same program; without any, no request is dynamic.
    """
    differ = any(other.fingerprint.input_sizes != step.fingerprint.input_sizes for other in others)
    scales = differ and all(scales_as(step, other) for other in others)
    partners = [same(step, other, scales) for other in others]
    dynamic = np.zeros(len(step.requests), bool)
    for partner in partners:
        dynamic |= partner < 0
    scaling = None
    if scales:
        scaling, unfit = _scaled(step, others, partners)
        dynamic |= unfit
    dynamic &= ~without_gradients(step)
    marked = []
    for other, partner in zip(others, partners, strict=True):
        its = np.ones(len(other.requests), bool)
        its[partner[~dynamic & (partner >= 0)]] = False
        its &= ~without_gradients(other)
        marked.append(replace(other, dynamic=its))
    return replace(step, dynamic=dynamic, scaling=scaling), marked


def scales_as(step: Trace, other: Trace) -> bool:
    """Return whether the inputs of two steps have the same dimensions, of whatever sizes."""
    sizes = [list(map(len, each.fingerprint.input_sizes)) for each in (step, other)]
    return sizes[0] == sizes[1]


def _scaled(step: Trace, others: Sequence[Trace], partners: Sequence[np.ndarray]) -> tuple[Scaling, np.ndarray]:
    """Return the sizes of a step's requests as functions of its inputs, and which requests are dynamic. bool[n].

    Where no function gives most sizes of a place, or of an experts' module, these requests are dynamic.
    """
    nbytes = np.array([step.requests["nbytes"], *(
        other.requests["nbytes"][np.maximum(partner, 0)] for other, partner in zip(others, partners, strict=True)
    )])  # fmt: skip
    fit, inputs = Fit(nbytes.shape[1]), [each.fingerprint.input_sizes for each in (step, *others)]
    for of_it in _alike_in_micro_batches(step):
        samples = [sizes[number] if number >= 0 else () for number in of_it for sizes in inputs]
        fit.add([*of_it.values()], np.concatenate([nbytes[:, rows] for rows in of_it.values()]), samples)
    scaling = fit.scaling(nbytes.max(axis=0, initial=0))
    unfit = (scaling.term == BOUNDED) & np.logical_and.reduce([partner >= 0 for partner in partners])
    dynamic = np.zeros(len(unfit), bool)
    for (_, _, layer, _), rows in _by_place(step):
        if unfit[rows].sum() > MOST * len(rows) or (layer is not None and layer.dynamic):
            dynamic[rows] = unfit[rows]
    return scaling, dynamic


def _alike_in_micro_batches(step: Trace) -> Iterable[dict[int, np.ndarray]]:
    """Return the rows of those requests that several micro-batches make alike, by micro-batch; below 0: none."""
    found: dict[tuple, dict[int, np.ndarray]] = {}
    numbers = micro_batches(step.phases, step.requests["malloc_phase"])
    dimensions = [*map(len, step.fingerprint.input_sizes), 0]
    for (kind, _, layer, stream), rows in _by_place(step):
        for number in np.unique(numbers[rows]).tolist():
            own = rows[numbers[rows] == number]
            names = tuple(name for name, _ in _asked(step, own, True))
            found.setdefault((kind, layer, stream, names, number < 0, dimensions[number]), {})[number] = own
    return found.values()


def same(step: Trace, other: Trace, scales: bool = False) -> np.ndarray:
    """Return for each request of a step the row of the same request in another step, or -1. int64[requests].

    Requests are compared place by place, by operator and by bytes in whole blocks; a place is a pass, a micro-batch, a
    layer and a stream. Where both steps make the same requests, all are the same, in any order, since other threads may
    change the order. Where few differ, the longest common runs are the same. Where many of a few differ, only requests
    at the same turn are. Where many of many differ, a loop ran there, over experts that got other tokens. Of its
    requests only those are the same that are freed elsewhere, such as weights' gradients, if their operator makes equal
    ones in both steps. Between the passes, where the script allocates what it likes, the longest common runs are the
    same in any case.

    Args:
        step: one recorded step.
        other: another one.
        scales: compare by operator alone, since the steps have inputs of other sizes.
    """
    found = np.full(len(step.requests), -1)
    theirs = dict(_by_place(other))
    for place, rows in _by_place(step):
        its = theirs.get(place, rows[:0])
        own_asked, its_asked = _asked(step, rows, scales), _asked(other, its, scales)
        if sorted(own_asked) == sorted(its_asked):
            found[rows[_order(own_asked)]] = its[_order(its_asked)]
            continue
        runs = list(_common_runs(own_asked, its_asked))
        longer = max(len(rows), len(its))
        is_loop = place[0] is not Pass.OTHER and longer - sum(count for _, _, count in runs) > FEW * longer
        if not is_loop:
            for begin, its_begin, count in runs:
                found[rows[begin : begin + count]] = its[its_begin : its_begin + count]
        elif len(rows) == len(its) <= SHORT:
            alike = np.array([one == another for one, another in zip(own_asked, its_asked, strict=True)])
            found[rows[alike]] = its[alike]
        else:
            for one, another in _steady(step, rows, own_asked, other, its, its_asked):
                found[one] = another
    return found


def _steady(
    step: Trace, rows: np.ndarray, asked: list[_Asked], other: Trace, its: np.ndarray, its_asked: list[_Asked]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows of one place in two steps that are the same requests, by operator and by where else they are freed."""
    of_kind, its_kinds = _by_kind(step, rows, asked), _by_kind(other, its, its_asked)
    for kind, found in of_kind.items():
        partners = its_kinds.get(kind, [])
        if [nbytes for nbytes, _ in found] == [nbytes for nbytes, _ in partners]:
            yield np.array([row for _, row in found]), np.array([row for _, row in partners])


def _by_kind(step: Trace, rows: np.ndarray, asked: list[_Asked]) -> dict[tuple, list[tuple[int, int]]]:
    """Return (bytes, row) of those requests that are freed elsewhere, by operator and place of the free; ascending."""
    found: dict[tuple, list[tuple[int, int]]] = {}
    freed = step.requests[["free_phase", "free_layer"]][rows].tolist()
    own = step.requests[["malloc_phase", "malloc_layer"]][rows[:1]].tolist()
    for row, (operator, nbytes), (phase, layer) in zip(rows.tolist(), asked, freed, strict=True):
        place = step.phases[phase] if phase >= 0 else None, step.layers[layer] if layer >= 0 else None
        if (phase, layer) not in own:
            found.setdefault((operator, *place), []).append((nbytes, row))
    return {kind: sorted(of_kind) for kind, of_kind in found.items()}


def _order(asked: list[_Asked]) -> list[int]:
    return sorted(range(len(asked)), key=asked.__getitem__)


def _common_runs(own: list[_Asked], its: list[_Asked]) -> Iterator[tuple[int, int, int]]:
    """Yield (first of `own`, first of `its`, length) of the longest common runs."""
    shorter = min(len(own), len(its))
    head = next((at for at in range(shorter) if own[at] != its[at]), shorter)
    tail = next((at for at in range(shorter - head) if own[-1 - at] != its[-1 - at]), shorter - head)
    yield 0, 0, head
    yield len(own) - tail, len(its) - tail, tail
    own, its = own[head : len(own) - tail], its[head : len(its) - tail]
    if len(own) * len(its) <= MOST_PAIRS:
        for run in SequenceMatcher(None, own, its, autojunk=False).get_matching_blocks():
            yield head + run.a, head + run.b, run.size


def _by_place(step: Trace) -> Iterator[tuple[_Place, np.ndarray]]:
    """Yield each place of a step with its requests, as ascending rows of `Trace.requests`."""
    keys = step.requests[["malloc_phase", "malloc_layer", "stream"]]
    places, place = np.unique(keys, return_inverse=True)
    order = np.argsort(place, kind="stable")
    bounds = np.searchsorted(place[order], np.arange(len(places) + 1))
    for (phase, layer, stream), begin, end in zip(places.tolist(), bounds[:-1], bounds[1:], strict=True):
        at, of = step.phases[phase], step.layers[layer] if layer >= 0 else None
        yield (at.kind, at.micro_batch, of, stream), order[begin:end]


def _asked(step: Trace, rows: np.ndarray, scales: bool) -> list[_Asked]:
    """Return the operator and the bytes, in whole blocks, of each of these requests; 0 bytes if they scale."""
    table = step.requests[rows]
    sizes = [0] * len(rows) if scales else rounded_up(table["nbytes"], BLOCK_BYTES).tolist()
    operators = table["malloc_operator"]
    names = [""] * len(rows)
    if len(step.operators):
        of = step.operators["name"][np.maximum(operators, 0)].tolist()
        names = [step.names[name] if at >= 0 else "" for name, at in zip(of, operators.tolist(), strict=True)]
    return list(zip(names, sizes, strict=True))
