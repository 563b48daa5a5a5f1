"""Derives requests for memory from the events of a trace: each malloc with its free, and the bytes in use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memplug.profile.records import REQUEST, EventKind, Layer, Pass, Phase


def requests(events: np.ndarray, layers: Sequence[Layer], dynamic: np.ndarray | None = None) -> np.ndarray:
    """Return all mallocs, each with its free.

    Args:
        events: REQUEST_EVENT[events]; see `Trace.events`.
        layers: the layers that the events refer to.
        dynamic: which requests are dynamic, bool[requests]; None: those of dynamic layers.

    Returns:
        REQUEST[requests], read-only, by running number. `earlier_frees` has the frees of memory that was allocated
        before the recording.
    """
    mallocs = np.flatnonzero(events["kind"] == EventKind.MALLOC)
    frees = np.flatnonzero((events["kind"] == EventKind.FREE) & (events["request"] >= 0))
    freed = events["request"][frees]
    table = np.empty(len(mallocs), REQUEST)
    table["number"] = np.arange(len(mallocs))
    table["nbytes"], table["stream"] = events["nbytes"][mallocs], events["stream"][mallocs]
    table["malloc_event"] = mallocs
    table["free_event"] = -1
    table["free_event"][freed] = frees
    for column in ("operator", "phase", "layer", "thread"):
        table[f"malloc_{column}"] = events[column][mallocs]
        table[f"free_{column}"] = -1
        table[f"free_{column}"][freed] = events[column][frees]
    # layer -1 (outside layers) indexes the last entry
    of_layer = np.array([*(layer.dynamic for layer in layers), False])[table["malloc_layer"]]
    table["dynamic"] = of_layer if dynamic is None else dynamic
    table.flags.writeable = False
    return table


def micro_batches(phases: Sequence[Phase], phase: np.ndarray) -> np.ndarray:
    """Return the micro-batch of each request; between passes, that of the forward before. int64[n].

    Args:
        phases: the phases of a trace.
        phase: index of each request's phase, in the order of requests; below 0: unknown.
    """
    kinds = np.array([int(each.kind) for each in phases] or [0])[phase]
    numbers = np.array([each.micro_batch for each in phases] or [0])[phase]
    forwards = np.where((kinds == Pass.FORWARD) & (phase >= 0), numbers, -1)
    return np.where(kinds == Pass.OTHER, np.maximum.accumulate(forwards), numbers)


def still_live(table: np.ndarray) -> np.ndarray:
    """Return which requests of a REQUEST array were live when the recording ended, bool[requests]."""
    return table["free_event"] < 0


def freed_elsewhere(table: np.ndarray) -> np.ndarray:
    """Return which requests of a REQUEST array were freed by another thread than their own, bool[requests]."""
    return ~still_live(table) & (table["free_thread"] != table["malloc_thread"])


def earlier_frees(events: np.ndarray) -> np.ndarray:
    """Return the indices into `Trace.events`, ascending, of frees whose malloc preceded the recording, int64[frees]."""
    return np.flatnonzero((events["kind"] == EventKind.FREE) & (events["request"] < 0))


def live_bytes(events: np.ndarray, base_bytes: int) -> np.ndarray:
    """Return the bytes in use after each event, including `base_bytes`.

    A free of memory that was allocated before the recording counts with the event's size, which is 0 if unknown.

    Args:
        events: REQUEST_EVENT[events]; see `Trace.events`.
        base_bytes: bytes in use before the first event.

    Returns:
        int64[events], read-only, aligned with `Trace.events`.
    """
    malloc = events["kind"] == EventKind.MALLOC
    change = np.where(malloc, events["nbytes"], -events["nbytes"])
    frees = np.flatnonzero(~malloc & (events["request"] >= 0))
    change[frees] = -events["nbytes"][malloc][events["request"][frees]]
    live = base_bytes + change.cumsum()
    live.flags.writeable = False
    return live
