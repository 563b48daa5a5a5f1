"""The tables that the native arena reads: the requests of each place in program order, with their addresses.

The arena has two pieces: the reused part for the blocks of one step, and the kept part for blocks that outlive steps.
In this file a group is a list of spaces (ranges of bytes in the reused part) that no planned request uses in a window
of time. Groups serve requests that have no planned address, or whose planned address is in use. A slot is a range of
bytes in the kept part, for one block. Slots of one size and stream form a slot class, and are interchangeable.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memplug.arena.plan.dynamic import idle_spaces
from memplug.arena.plan.part import AddressPlan
from memplug.arena.plan.problem import Problem
from memplug.errors import LayoutError
from memplug.profile.scaling import Term
from memplug.sizes import BLOCK_BYTES

MARGIN_BYTES = BLOCK_BYTES
"""Bytes after each block of an arena with `checks`, to detect writes beyond the block."""

PLANNED_REQUEST = np.dtype(  # in program order within each place
    [
        ("size", "<i8"),  # the most bytes, a multiple of BLOCK_BYTES; with checks, including MARGIN_BYTES
        ("offset", "<i8"),  # in the reused part; meaningless where `kept` is not -1
        ("base", "<i8"),  # bytes as requested: base + factor * term; unless `term` is CONSTANT or BOUNDED
        ("factor", "<i8"),
        ("crosses", "<u8"),  # bit n: stream n uses some of these bytes at other times
        ("phase", "<i4"),  # (micro-batch + 1) * 8 + pass
        ("layer", "<i4"),
        ("stream", "<i4"),  # 0 is the main stream, on which dynamic requests are served
        ("kept", "<i4"),  # slot class if the block outlives the step (any free slot of the class serves it); else -1
        ("spare", "<i4"),  # group of reusable space to use if these bytes are not free; -1: none
        ("term", "<i4"),  # index into `ArenaTables.terms`; CONSTANT or BOUNDED (`memplug.profile.scaling`)
    ]
)
KEPT_SLOT = np.dtype([("offset", "<i8"), ("kept", "<i4")])  # offset in the kept part; slot class
DYNAMIC_REQUEST = np.dtype(  # in program order within each place; a place's last row stands for all further requests
    [("phase", "<i4"), ("layer", "<i4"), ("group", "<i4")]  # group -1: torch's allocator serves the request
)
IDLE_SPACE = np.dtype([("begin", "<i8"), ("end", "<i8"), ("group", "<i4")])  # by group, then by address

MOST_STREAMS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaTables:
    """A plan as the native arena reads it.

    Attributes:
        requests, slots, dynamic, spaces: of the dtypes PLANNED_REQUEST, KEPT_SLOT, DYNAMIC_REQUEST and IDLE_SPACE.
        crosses: for each group, a bitset of the streams other than the main one that use its bytes.
        ceilings: for each group of dynamic requests, which come first, as `DynamicSpace.ceiling` in the reused part.
        reusable: groups to try, in this order, for a request outside of the program, such as a validation's.
        terms: products of the sizes of a micro-batch's inputs; see `Problem.terms`.
        reused_bytes: size of the reused part.
        kept_bytes: size of the kept part. It is reserved separately, so that it can stay when the reused part is
            released.
        streams: number of streams, at most MOST_STREAMS.
        rows: each request's row in the problem, int64[n].
    """

    requests: np.ndarray
    slots: np.ndarray
    dynamic: np.ndarray
    spaces: np.ndarray
    crosses: Sequence[int]
    ceilings: Sequence[int]
    reusable: Sequence[int]
    terms: Sequence[Term]
    reused_bytes: int
    kept_bytes: int
    streams: int
    rows: np.ndarray


PARTS = 32  # a step is divided into this many equal parts; windows of time begin and end at their borders

Spaces = tuple[tuple[int, int], ...]


def tables_of(plan: AddressPlan) -> ArenaTables:
    """Return the tables of a plan that the judge has accepted.

    Requests on streams beyond the 64th, for which `crosses` has no bit, are left to torch's allocator.

    Raises:
        LayoutError: buffers that outlive the step do not lie below all others, so they cannot be reserved separately.
    """
    table, offsets, kept = plan.problem.buffers, plan.solution.offsets, plan.problem.buffers["outlives"]
    kept_bytes = int((offsets + table["size"])[kept].max(initial=0))
    if (offsets[~kept] < kept_bytes).any():
        raise LayoutError(
            "buffers that outlive the step lie among others", "Make the plan again with this version of memplug."
        )
    stream = _numbered(plan.problem)
    reused = offsets - kept_bytes
    asked = ~kept & ~table["room"]
    used = _Used(reused[asked], table["size"][asked], stream[asked])
    kind = _kinds(table, stream)
    crosses = np.where(kept, 0, used.masks(reused, reused + table["size"], stream))
    requests, rows = _requests(plan.problem, reused, crosses, stream, kind)
    dynamic, groups, ceilings = _dynamic(plan)
    reusable = _reusable_from_the_beginning(plan)
    spare, of_row = _idle_meanwhile(plan, rows)
    requests["spare"] = np.where(kept[rows], -1, len(groups) + len(reusable) + of_row)
    groups += [*reusable, *spare]
    spaces = [tuple((begin - kept_bytes, end - kept_bytes) for begin, end in group) for group in groups]
    return ArenaTables(
        requests=requests,
        rows=rows,
        slots=_rows(KEPT_SLOT, offset=offsets[kept], kept=kind[kept]),
        dynamic=dynamic,
        spaces=np.array([(*space, at) for at, group in enumerate(spaces) for space in group], IDLE_SPACE),
        crosses=[used.by_others(group, 0) for group in spaces],
        ceilings=[max(0, ceiling - kept_bytes) for ceiling in ceilings],
        reusable=range(len(groups) - len(spare) - len(reusable), len(groups) - len(spare)),
        terms=plan.problem.terms,
        reused_bytes=plan.solution.height - kept_bytes,
        kept_bytes=kept_bytes,
        streams=int(stream[stream < MOST_STREAMS].max(initial=0)) + 1,
    )


def _numbered(problem: Problem) -> np.ndarray:
    """Return the stream of each buffer, renumbered so that the main stream is 0. int64[n]."""
    streams = problem.buffers["stream"].tolist()
    others = sorted({*streams} - {problem.main_stream})
    number = {stream: at for at, stream in enumerate([problem.main_stream, *others])}
    return np.array([number[stream] for stream in streams], np.int64)


def _kinds(table: np.ndarray, stream: np.ndarray) -> np.ndarray:
    """Return each buffer's slot class (one per size and stream) if it outlives the step, else -1. int64[n]."""
    kinds, kept = np.full(len(table), -1), table["outlives"]
    if kept.any():
        kinds[kept] = np.unique(np.stack([table["size"], stream])[:, kept], axis=1, return_inverse=True)[1].reshape(-1)
    return kinds


def _requests(
    problem: Problem, offsets: np.ndarray, crosses: np.ndarray, stream: np.ndarray, kind: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the requests, of dtype PLANNED_REQUEST, and the row of each, int64[n].

    Buffers that the step before left are not among them, since this step does not request them; rooms are not either.
    """
    table = problem.buffers
    rows = np.flatnonzero((table["lower_phase"] >= 0) & (stream < MOST_STREAMS) & ~table["room"])
    phase = _places(problem)[rows]
    layer = table["lower_layer"][rows]
    order = np.lexsort((rows, layer, phase))
    rows = rows[order]
    requests = _rows(
        PLANNED_REQUEST,
        size=table["size"][rows],
        offset=offsets[rows],
        crosses=crosses[rows],
        phase=phase[order],
        layer=layer[order],
        stream=stream[rows],
        kept=kind[rows],
        spare=np.full(len(rows), -1),
        **{column: table[column][rows] for column in ("base", "factor", "term")},
    )
    return requests, rows


def _places(problem: Problem) -> np.ndarray:
    """Return the phase of each buffer's request as the native core packs it. int64[n]."""
    kinds = np.array([int(phase.kind) for phase in problem.phases] or [0])[problem.buffers["lower_phase"]]
    return (problem.micro_batch + 1) * 8 + kinds


def _dynamic(plan: AddressPlan) -> tuple[np.ndarray, list[Spaces], list[int]]:
    """Return the dynamic requests, of dtype DYNAMIC_REQUEST, and the spaces and the ceiling of each group.

    The groups are those of the plan, and an extra group for each place. The extra group serves requests that the
    recorded step did not make. It may use only the bytes that all other groups of the place may use.
    """
    spaces, ceilings = [group.spaces for group in plan.dynamic], [group.ceiling for group in plan.dynamic]
    of_place: dict[tuple[int, int], list[int]] = {}
    for number, group in enumerate(plan.dynamic):
        if group.malloc_phase >= 0:
            of_place.setdefault((group.malloc_phase, group.malloc_layer), []).append(number)
    main = [group.stream == plan.problem.main_stream for group in plan.dynamic]
    rows: list[tuple[int, int, int]] = []
    for (phase, layer), of_it in of_place.items():
        numbers = [number for number in of_it if main[number]]
        if not numbers:
            continue
        spaces.append(functools.reduce(_common, [spaces[number] for number in numbers]))
        ceilings.append(min(ceilings[number] for number in numbers))  # 0 if the lowest bytes serve one of them
        encoded = (plan.problem.phases[phase].micro_batch + 1) * 8 + int(plan.problem.phases[phase].kind)
        turns = sorted((malloc, number) for number in of_it for malloc in plan.dynamic[number].mallocs)
        rows += [(encoded, layer, number if main[number] else -1) for _, number in turns]
        rows.append((encoded, layer, len(spaces) - 1))
    return np.array(rows, DYNAMIC_REQUEST), spaces, ceilings


def _reusable_from_the_beginning(plan: AddressPlan) -> list[Spaces]:
    """Return groups of spaces that are unused at the beginning of a step, the longest unused first.

    Memory that is allocated between two steps, such as a batch, may stay in use for a while in the next step.
    """
    end = int(plan.problem.buffers["upper"].max(initial=0))
    windows = [(0, end * part // PARTS) for part in range(PARTS - 1, 0, -1)]
    return idle_spaces(plan.problem, plan.solution, windows)


def _idle_meanwhile(plan: AddressPlan, rows: np.ndarray) -> tuple[list[Spaces], np.ndarray]:
    """Return groups of spaces, and for each row the group whose spaces are unused during its lifetime, int64[n].

    If the planned bytes of a row's request are not free, this group serves the request.
    """
    table = plan.problem.buffers[rows]
    end = max(1, int(plan.problem.buffers["upper"].max(initial=1)))
    parts = np.stack([table["lower"] * PARTS // end, -(-table["upper"] * PARTS // end)], axis=1)
    pairs, of_row = np.unique(parts, axis=0, return_inverse=True)
    windows = [(end * first // PARTS, -(-end * last // PARTS)) for first, last in pairs.tolist()]
    return idle_spaces(plan.problem, plan.solution, windows), of_row.reshape(-1)


def _common(one: Spaces, other: Spaces) -> Spaces:
    """Return the bytes that `one` and `other` have in common, as spaces sorted by address."""
    both = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return tuple(sorted(space for space in both if space[0] < space[1]))


def _rows(dtype: np.dtype, **columns: np.ndarray) -> np.ndarray:
    rows = np.empty(len(next(iter(columns.values()))), dtype)
    for name, values in columns.items():
        rows[name] = values
    return rows


class _Used:
    """The bytes of the reused part that each stream uses at any time.

    Args:
        offsets: of each buffer, bytes.
        sizes: of each buffer, bytes.
        stream: of each buffer.
    """

    def __init__(self, offsets: np.ndarray, sizes: np.ndarray, stream: np.ndarray):
        self._merged = {
            number: _merged(offsets[stream == number], (offsets + sizes)[stream == number])
            for number in np.unique(stream[stream < MOST_STREAMS]).tolist()
        }

    def masks(self, begins: np.ndarray, ends: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Return for each range of bytes a bitset of the streams, other than `own`, that use any of it. uint64[n]."""
        masks = np.zeros(len(begins), np.uint64)
        for number, (first, last) in self._merged.items():
            above = np.searchsorted(last, begins, "right")
            touches = np.append(first, np.iinfo(np.int64).max)[above] < ends
            masks[touches & (own != number)] |= np.uint64(1 << number)
        return masks

    def by_others(self, spaces: Spaces, own: int) -> int:
        """Return the bitset of the streams, other than `own`, that use any byte of these spaces."""
        begins, ends = (np.array([space[side] for space in spaces], np.int64) for side in (0, 1))
        return int(np.bitwise_or.reduce(self.masks(begins, ends, np.full(len(spaces), own)), initial=0))


def _merged(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the union of ranges of bytes as disjoint ranges, sorted by address."""
    order = np.argsort(begins)
    begins, reach = begins[order], np.maximum.accumulate(ends[order])
    fresh = np.concatenate([[True], begins[1:] > reach[:-1]])
    return begins[fresh], reach[np.append(fresh[1:], True)]
