"""What the events of a trace say about requests for memory: each malloc with its free, and the bytes in use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memplug.profile.records import REQUEST, EventKind, Layer


def requests(events: np.ndarray, layers: Sequence[Layer]) -> np.ndarray:
    """Every malloc with its free; none is dropped.

    Args:
        events: of dtype REQUEST_EVENT, see `Trace.events`.
        layers: that they name.

    Returns:
        Of dtype REQUEST, read-only, by running number. Frees of what was allocated before the recording belong to no
        malloc here: see `earlier_frees`.
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
    # The last entry is what -1, outside of layers, refers to.
    table["dynamic"] = np.array([*(layer.dynamic for layer in layers), False])[table["malloc_layer"]]
    table.flags.writeable = False
    return table


def still_live(table: np.ndarray) -> np.ndarray:
    """Which rows of a REQUEST array were not freed when the recording ended: of dtype bool."""
    return table["free_event"] < 0


def freed_elsewhere(table: np.ndarray) -> np.ndarray:
    """Which rows of a REQUEST array were freed by another thread than the one that asked: of dtype bool."""
    return ~still_live(table) & (table["free_thread"] != table["malloc_thread"])


def earlier_frees(events: np.ndarray) -> np.ndarray:
    """Indices into `Trace.events` of the frees whose malloc was before the recording: int64, rising."""
    return np.flatnonzero((events["kind"] == EventKind.FREE) & (events["request"] < 0))


def live_bytes(events: np.ndarray, base_bytes: int) -> np.ndarray:
    """Bytes in use after each event, `base_bytes` included.

    Frees of what was allocated before the recording count with the size that the event has, which may be 0: unknown.

    Returns:
        int64, read-only, aligned with `Trace.events`.
    """
    malloc = events["kind"] == EventKind.MALLOC
    change = np.where(malloc, events["nbytes"], -events["nbytes"])
    frees = np.flatnonzero(~malloc & (events["request"] >= 0))
    change[frees] = -events["nbytes"][malloc][events["request"][frees]]
    live = base_bytes + change.cumsum()
    live.flags.writeable = False
    return live
