"""From planned addresses to what the arena reads: each place's requests in program order, with their addresses."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memplug.arena.plan.dynamic import idle_spaces
from memplug.arena.plan.part import AddressPlan
from memplug.arena.plan.problem import Problem
from memplug.errors import LayoutError
from memplug.profile.records import Pass
from memplug.sizes import BLOCK_BYTES

MARGIN_BYTES = BLOCK_BYTES
"""What follows each block in the mode that checks."""

PLANNED_REQUEST = np.dtype(  # in program order within each place
    [
        ("size", "<i8"),  # bytes, a multiple of BLOCK_BYTES; in the mode that checks, with MARGIN_BYTES
        ("offset", "<i8"),  # in the part that is used again and again; of no meaning where `kept` is not -1
        ("crosses", "<u8"),  # bit n: stream n uses some of these bytes at other times
        ("phase", "<i4"),  # (micro-batch + 1) * 8 + pass
        ("layer", "<i4"),
        ("stream", "<i4"),  # 0 is the main one, where dynamic requests are served
        ("kept", "<i4"),  # outlives the step: any free slot of this number will do; -1: it does not
        ("spare", "<i4"),  # group of reusable space to use where its bytes are not free; -1: none
    ]
)
KEPT_SLOT = np.dtype([("offset", "<i8"), ("kept", "<i4")])  # offset in the part of what outlives steps
DYNAMIC_REQUEST = np.dtype(  # in program order within each place; the last one stands for whatever else comes there
    [("phase", "<i4"), ("layer", "<i4"), ("group", "<i4")]  # group -1: none that is served
)
IDLE_SPACE = np.dtype([("begin", "<i8"), ("end", "<i8"), ("group", "<i4")])  # that a group may use; rising in each

MOST_STREAMS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """A plan as the native arena reads it.

    Attributes:
        requests, slots, dynamic, spaces: of the dtypes PLANNED_REQUEST, KEPT_SLOT, DYNAMIC_REQUEST and IDLE_SPACE.
        crosses: of each group, as in PLANNED_REQUEST.
        reusable: groups that a validation between the steps is to use, in this order.
        reused_bytes: of the part that is used again and again.
        kept_bytes: of the part of what outlives steps, which is reserved apart: it can stay when the other goes.
        streams: how many the requests are on, at most MOST_STREAMS.
        rows: of each request, in the problem that was planned: int64.
    """

    requests: np.ndarray
    slots: np.ndarray
    dynamic: np.ndarray
    spaces: np.ndarray
    crosses: Sequence[int]
    reusable: Sequence[int]
    reused_bytes: int
    kept_bytes: int
    streams: int
    rows: np.ndarray


PARTS = 32  # of a step, by which it is told apart when bytes are needed

Spaces = tuple[tuple[int, int], ...]


def tables_of(plan: AddressPlan) -> Tables:
    """What the arena needs of a plan that the judge has accepted.

    Requests on a 65th stream, which has no bit to be told by, are left to the native allocator.

    Raises:
        LayoutError: what outlives the step does not lie below all the rest, so that it cannot be reserved apart.
    """
    table, offsets, kept = plan.problem.buffers, plan.solution.offsets, plan.problem.buffers["outlives"]
    kept_bytes = int((offsets + table["size"])[kept].max(initial=0))
    if (offsets[~kept] < kept_bytes).any():
        raise LayoutError(
            "what outlives the step lies among what does not", "Make the plan again with this version of memplug."
        )
    stream = _numbered(plan.problem)
    reused = offsets - kept_bytes
    used = _Used(reused[~kept], table["size"][~kept], stream[~kept])
    kind = _kinds(table, stream)
    crosses = np.where(kept, 0, used.masks(reused, reused + table["size"], stream))
    requests, rows = _requests(plan.problem, reused, crosses, stream, kind)
    dynamic, groups = _dynamic(plan)
    reusable = _reusable_from_the_beginning(plan)
    spare, of_row = _idle_meanwhile(plan, rows)
    requests["spare"] = np.where(kept[rows], -1, len(groups) + len(reusable) + of_row)
    groups += [*reusable, *spare]
    spaces = [tuple((begin - kept_bytes, end - kept_bytes) for begin, end in group) for group in groups]
    return Tables(
        requests=requests,
        rows=rows,
        slots=_rows(KEPT_SLOT, offset=offsets[kept], kept=kind[kept]),
        dynamic=dynamic,
        spaces=np.array([(*space, at) for at, group in enumerate(spaces) for space in group], IDLE_SPACE),
        crosses=[used.by_others(group, 0) for group in spaces],
        reusable=range(len(groups) - len(spare) - len(reusable), len(groups) - len(spare)),
        reused_bytes=plan.solution.height - kept_bytes,
        kept_bytes=kept_bytes,
        streams=int(stream[stream < MOST_STREAMS].max(initial=0)) + 1,
    )


def _numbered(problem: Problem) -> np.ndarray:
    """Stream of each buffer, the main one being 0: int64."""
    streams = problem.buffers["stream"].tolist()
    others = sorted({*streams} - {problem.main_stream})
    number = {stream: at for at, stream in enumerate([problem.main_stream, *others])}
    return np.array([number[stream] for stream in streams], np.int64)


def _kinds(table: np.ndarray, stream: np.ndarray) -> np.ndarray:
    """Of what outlives the step, a number for each size and stream, by which requests take turns; else -1: int64."""
    kinds, kept = np.full(len(table), -1), table["outlives"]
    if kept.any():
        kinds[kept] = np.unique(np.stack([table["size"], stream])[:, kept], axis=1, return_inverse=True)[1].reshape(-1)
    return kinds


def _requests(
    problem: Problem, offsets: np.ndarray, crosses: np.ndarray, stream: np.ndarray, kind: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of dtype PLANNED_REQUEST, and the buffer of each; what the step before left is no request."""
    table = problem.buffers
    rows = np.flatnonzero((table["lower_phase"] >= 0) & (stream < MOST_STREAMS))
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
    )
    return requests, rows


def _places(problem: Problem) -> np.ndarray:
    """The phase of each buffer's request as the native core packs it: int64. What lies between passes is told apart by
    the forward that came before it.
    """
    kinds = np.array([int(phase.kind) for phase in problem.phases] or [0])[problem.buffers["lower_phase"]]
    batches = np.array([phase.micro_batch for phase in problem.phases] or [0])[problem.buffers["lower_phase"]]
    forwards = np.where((kinds == Pass.FORWARD) & (problem.buffers["lower_phase"] >= 0), batches, -1)
    return (np.where(kinds == Pass.OTHER, np.maximum.accumulate(forwards), batches) + 1) * 8 + kinds


def _dynamic(plan: AddressPlan) -> tuple[np.ndarray, list[Spaces]]:
    """Of dtype DYNAMIC_REQUEST, and the spaces of each group: those of the plan, and for each place one for requests
    that it had none of: what all of the place's groups may use.
    """
    spaces = [group.spaces for group in plan.dynamic]
    of_place: dict[tuple[int, int], list[int]] = {}
    for number, group in enumerate(plan.dynamic):
        if group.stream == plan.problem.main_stream and group.malloc_phase >= 0:
            of_place.setdefault((group.malloc_phase, group.malloc_layer), []).append(number)
    rows: list[tuple[int, int, int]] = []
    for (phase, layer), numbers in of_place.items():
        groups = {member: number for number in numbers for member in plan.dynamic[number].members}
        spaces.append(functools.reduce(_common, [spaces[number] for number in numbers]))
        encoded = (plan.problem.phases[phase].micro_batch + 1) * 8 + int(plan.problem.phases[phase].kind)
        rows += [(encoded, layer, groups.get(member, -1)) for member in range(max(groups) + 1)]
        rows.append((encoded, layer, len(spaces) - 1))
    return np.array(rows, DYNAMIC_REQUEST), spaces


def _reusable_from_the_beginning(plan: AddressPlan) -> list[Spaces]:
    """What no buffer uses from the beginning of a step on, the longest time first.

    What is made between two steps and stays in use, such as a batch, may so last into the step for a while.
    """
    end = int(plan.problem.buffers["upper"].max(initial=0))
    windows = [(0, end * part // PARTS) for part in range(PARTS - 1, 0, -1)]
    return idle_spaces(plan.problem, plan.solution, windows)


def _idle_meanwhile(plan: AddressPlan, rows: np.ndarray) -> tuple[list[Spaces], np.ndarray]:
    """What no buffer uses in the parts of the step in which buffers live, and which of these is each row's: what is
    there for requests whose own bytes are not free.
    """
    table = plan.problem.buffers[rows]
    end = max(1, int(plan.problem.buffers["upper"].max(initial=1)))
    parts = np.stack([table["lower"] * PARTS // end, -(-table["upper"] * PARTS // end)], axis=1)
    pairs, of_row = np.unique(parts, axis=0, return_inverse=True)
    windows = [(end * first // PARTS, -(-end * last // PARTS)) for first, last in pairs.tolist()]
    return idle_spaces(plan.problem, plan.solution, windows), of_row.reshape(-1)


def _common(one: Spaces, other: Spaces) -> Spaces:
    """Bytes that are in both, rising."""
    both = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return tuple(sorted(space for space in both if space[0] < space[1]))


def _rows(dtype: np.dtype, **columns: np.ndarray) -> np.ndarray:
    rows = np.empty(len(next(iter(columns.values()))), dtype)
    for name, values in columns.items():
        rows[name] = values
    return rows


class _Used:
    """Which bytes of the part that is used again and again each stream ever uses.

    Args:
        offsets, sizes, stream: of each buffer.
    """

    def __init__(self, offsets: np.ndarray, sizes: np.ndarray, stream: np.ndarray):
        self._merged = {
            number: _merged(offsets[stream == number], (offsets + sizes)[stream == number])
            for number in np.unique(stream[stream < MOST_STREAMS]).tolist()
        }

    def masks(self, begins: np.ndarray, ends: np.ndarray, own: np.ndarray) -> np.ndarray:
        """For each stretch a bit for each stream but its own that uses any byte of it: uint64[n]."""
        masks = np.zeros(len(begins), np.uint64)
        for number, (first, last) in self._merged.items():
            above = np.searchsorted(last, begins, "right")
            touches = np.append(first, np.iinfo(np.int64).max)[above] < ends
            masks[touches & (own != number)] |= np.uint64(1 << number)
        return masks

    def by_others(self, spaces: Spaces, own: int) -> int:
        """The same for several stretches together."""
        begins, ends = (np.array([space[side] for space in spaces], np.int64) for side in (0, 1))
        return int(np.bitwise_or.reduce(self.masks(begins, ends, np.full(len(spaces), own)), initial=0))


def _merged(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The union of stretches, as disjoint rising ones."""
    order = np.argsort(begins)
    begins, reach = begins[order], np.maximum.accumulate(ends[order])
    fresh = np.concatenate([[True], begins[1:] > reach[:-1]])
    return begins[fresh], reach[np.append(fresh[1:], True)]
