"""Estimates when tokenwise's copies occupy the link, which they share with the list's copies (Chameleon, 5.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from memplug.profile.records import Pass
from memplug.profile.trace import Trace
from memplug.swap.plan.from_trace import clock_of


def busy_s(
    step: Trace, begin_s: np.ndarray, layer_bytes: Mapping[str, int], d2h_bytes_per_s: float, h2d_bytes_per_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return how long the link is busy with other copies while each outermost operator runs.

    Copies of one direction follow one another. A layer's copy to the host starts no earlier than the layer's forward,
    and its copy back ends no later than the layer's backward begins.

    Args:
        step: one step.
        begin_s: float64[n + 1]: see `SwapProblem`.
        layer_bytes: bytes that one forward of a layer offloads, and its backward prefetches, by the layer's name.
        d2h_bytes_per_s: rate to the host, while both directions run.
        h2d_bytes_per_s: rate to the device, while both directions run.

    Returns:
        float64[n] to the host and float64[n] to the device, in seconds, none longer than its operator.
    """
    begins = {each: _begins(step, begin_s, layer_bytes, each) for each in (Pass.FORWARD, Pass.BACKWARD)}
    out = _one_after_the_other(begins[Pass.FORWARD], d2h_bytes_per_s)
    back = _one_after_the_other([(-time_s, nbytes) for time_s, nbytes in begins[Pass.BACKWARD]], h2d_bytes_per_s)
    return _within(out, begin_s), _within([(-end_s, -start_s) for start_s, end_s in back], begin_s)


def _begins(step: Trace, begin_s: np.ndarray, layer_bytes: Mapping[str, int], which: Pass) -> list[tuple[float, int]]:
    """Return (beginning in seconds, bytes to copy) for each phase of the kind `which` in each layer."""
    now = clock_of(step).now
    of_phase = np.array([phase.kind is which for phase in step.phases], bool)
    nbytes = [layer_bytes.get(layer.name, 0) for layer in step.layers]
    operators = step.operators
    here = np.flatnonzero(of_phase[operators["phase"]] & (operators["layer"] >= 0) & (operators["depth"] >= 0))
    passes = operators[["phase", "layer"]][here]
    _, first = np.unique(passes, return_index=True)
    found = [(float(begin_s[now[here[at]]]), nbytes[passes["layer"][at]]) for at in first.tolist()]
    return [each for each in found if each[1]]


def _one_after_the_other(begins: Iterable[tuple[float, int]], bytes_per_s: float) -> list[tuple[float, float]]:
    """Return when each copy begins and ends: it begins at its own time, or when the copy before it ends, if later."""
    until_s, spans = -np.inf, []
    for begin_s, nbytes in sorted(begins):
        start_s = max(begin_s, until_s)
        until_s = start_s + nbytes / bytes_per_s
        spans.append((start_s, until_s))
    return spans


def _within(spans: Iterable[tuple[float, float]], begin_s: np.ndarray) -> np.ndarray:
    """Return how many seconds of these disjoint spans fall into each operator."""
    busy = np.zeros(len(begin_s) - 1)
    for start_s, end_s in spans:
        busy += np.clip(np.minimum(begin_s[1:], end_s) - np.maximum(begin_s[:-1], start_s), 0.0, None)
    return np.minimum(busy, np.diff(begin_s))
