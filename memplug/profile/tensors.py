"""Computes features of a tensor at each of its uses, by which memplug recognises the tensor in the next step.

See Chameleon, "Detailed mode" in section 4, and appendix A. Addresses change from one step to the next, and tensors
have no names. The number of uses, the operators that used the tensor, its dtype and its size stay the same. All
features are integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memplug.profile.trace import Pass, Trace

TAGGED = 32
"""Number of the most frequent operators, each of which has a bit in the feature `tag`."""
REMEMBERED = 8
"""Number of the latest uses in the feature `stack`, eight bits for each."""

FEATURES = np.dtype(
    [
        ("count", "<i4"),  # number of uses up to and including this one
        ("tag", "<u4"),  # bit r: an operator of rank r < TAGGED (see `ranking`) has used it
        ("stack", "<u8"),  # ranks, up to 255, of the operators of the latest uses; the last use in the lowest 8 bits
        ("dtype", "<i4"),  # index into Trace.dtypes
        ("nbytes", "<i8"),
    ]
)
LIFE = np.dtype(
    [
        ("nbytes", "<i8"),
        ("dtype", "<i4"),  # index into Trace.dtypes
        ("first_operator", "<i4"),  # first operator that used the tensor, or -1
        ("last_operator", "<i4"),
        ("uses", "<i4"),
        ("use", "<i8"),  # index into Trace.uses of the use that the next three columns describe, or -1
        ("count", "<i4"),  # this column and the next two: as in FEATURES
        ("tag", "<u4"),
        ("stack", "<u8"),
    ]
)


def ranking(trace: Trace) -> tuple[str, ...]:
    """Return the names of the operators that ran, the most frequent first; equally frequent ones in order of names."""
    counts = np.bincount(trace.operators["name"], minlength=len(trace.names)).tolist()
    ran = sorted((-count, name) for count, name in zip(counts, trace.names, strict=True) if count)
    return tuple(name for _, name in ran)


def features(trace: Trace, ranks: Sequence[str] | None = None) -> np.ndarray:
    """Return the features of every tensor at each of its uses.

    An operator that uses a tensor twice, for example as input and as output, counts twice. A stack of 0 may mean no
    uses, or only uses by the operator of rank 0: the count tells the two apart.

    Args:
        trace: any trace; without uses the result is empty.
        ranks: names of operators, by rank; by default `ranking(trace)`. To compare the features of two traces, pass the
            same names for both; their `Trace.dtypes` must be equal too. An operator that is not among the names sets no
            bit in tags, and is 255 in stacks.

    Returns:
        FEATURES[uses], aligned with `trace.uses`.
    """
    # sort by tensor, then in program order
    order = np.argsort(trace.uses["tensor"], kind="stable")
    tensor = trace.uses["tensor"][order]
    rank = _rank_of_uses(trace, ranking(trace) if ranks is None else ranks)[order]
    past = np.arange(len(order)) - np.searchsorted(tensor, tensor)  # number of earlier uses of the same tensor
    sorted_table = np.empty(len(order), FEATURES)
    sorted_table["count"] = past + 1
    sorted_table["tag"] = _tags(tensor, rank, past)
    sorted_table["stack"] = _stacks(rank, past)
    for column in ("dtype", "nbytes"):
        sorted_table[column] = trace.tensors[column][tensor]
    table = np.empty_like(sorted_table)
    table[order] = sorted_table
    return table


def lives(trace: Trace, ranks: Sequence[str] | None = None) -> np.ndarray:
    """Return the first and last operator that used each tensor, and its features at its last use in a forward.

    A swap-out begins after that use (Chameleon, 5.3). If no forward uses the tensor, the features are those of its last
    use. The trace should have one step (see `cut`).

    Args:
        trace: any trace.
        ranks: as in `features`.

    Returns:
        LIFE[tensors], aligned with `trace.tensors`. For a tensor without uses, `first_operator`, `last_operator` and
        `use` are -1, and the features 0.
    """
    uses, tensors = trace.uses, trace.tensors
    operator, place = uses["operator"], np.arange(len(uses))
    kinds = np.array([phase.kind for phase in trace.phases], np.int64)
    forward = kinds[trace.operators["phase"][operator]] == Pass.FORWARD
    last, last_forward = np.full((2, len(tensors)), -1)
    np.maximum.at(last, uses["tensor"], place)
    np.maximum.at(last_forward, uses["tensor"][forward], place[forward])

    table = np.zeros(len(tensors), LIFE)
    table["nbytes"], table["dtype"] = tensors["nbytes"], tensors["dtype"]
    table["first_operator"] = table["last_operator"] = -1
    used, first = np.unique(uses["tensor"], return_index=True)
    table["first_operator"][used] = operator[first]
    table["last_operator"][used] = operator[last[used]]
    table["uses"] = np.bincount(uses["tensor"], minlength=len(tensors))
    table["use"] = np.where(last_forward >= 0, last_forward, last)
    then = features(trace, ranks)[table["use"][used]]
    for column in ("count", "tag", "stack"):
        table[column][used] = then[column]
    return table


def _rank_of_uses(trace: Trace, ranks: Sequence[str]) -> np.ndarray:
    """Return the rank of each use's operator, int64[uses]; operators without a rank get one behind all others."""
    rank_of = {name: rank for rank, name in enumerate(ranks)}
    none = max(len(ranks), 255)
    of_name = np.array([rank_of.get(name, none) for name in trace.names], np.int64)
    return of_name[trace.operators["name"][trace.uses["operator"]]]


def _tags(tensor: np.ndarray, rank: np.ndarray, past: np.ndarray) -> np.ndarray:
    """Return the tag of each use, uint64[uses].

    Uses are sorted by tensor; `past` is the number of earlier uses of the same tensor.
    """
    tagged = np.flatnonzero(rank < TAGGED)
    _, first = np.unique(tensor[tagged].astype(np.int64) * TAGGED + rank[tagged], return_index=True)
    added = np.zeros(len(rank), np.uint64)
    added[tagged[first]] = np.uint64(1) << rank[tagged[first]].astype(np.uint64)
    # each bit is added once for a tensor, so the sum is the bitwise OR; the running sum over all tensors may wrap, but
    # differences of it are still right
    total = np.cumsum(added)
    begin = np.arange(len(rank)) - past
    return total - (total[begin] - added[begin])


def _stacks(rank: np.ndarray, past: np.ndarray) -> np.ndarray:
    """Return the stack of each use, uint64[uses], with the same arguments as `_tags`."""
    index = np.minimum(rank, 255).astype(np.uint64)
    stack = np.zeros(len(rank), np.uint64)
    for back in range(REMEMBERED):
        there = np.flatnonzero(past >= back)
        stack[there] |= index[there - back] << np.uint64(8 * back)
    return stack
