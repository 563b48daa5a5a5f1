"""The arena's part of a plan: requests, their addresses, reusable space for dynamic requests, and predictions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memplug.arena.plan.problem import BUFFER, ORDERING, Problem, Solution, fragmentation
from memplug.plans.schema import MemoryPlan, PlanPart
from memplug.plans.values import read
from memplug.profile.records import Layer, Pass, Phase

_PLACES = ("lower_phase", "upper_phase", "lower_layer", "upper_layer")
_MOST_BYTES = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSpace:
    """The reusable space of one HomoLayer group of dynamic requests (STWeaver, section 5.2, Eq. 2 to 5).

    The size of a dynamic request is known only at run time. A HomoLayer group has the dynamic requests of one stream
    that are made in one layer and freed in one layer.

    Attributes:
        malloc_phase, malloc_layer, free_phase, free_layer: of the group's requests, as indices into the problem's
            phases and layers; -1: outside of layers, or (free_*) not freed in the step.
        stream: the stream of the requests.
        lower, upper: on the problem's clock; all of the group's requests live in [lower, upper).
        spaces: ranges (first byte, end) that no planned buffer uses in [lower, upper); disjoint, sorted, none empty.
        mallocs: on the problem's clock, when the recorded step made each of the group's requests; sorted.
        peak_bytes: the most bytes that the group had in use at once in the recorded step.
        ceiling: the group's requests get the highest free bytes below this offset, or the lowest ones if there are
            none; 0: the lowest ones.
    """

    malloc_phase: int
    malloc_layer: int
    free_phase: int
    free_layer: int
    stream: int
    lower: int
    upper: int
    spaces: tuple[tuple[int, int], ...]
    mallocs: tuple[int, ...]
    peak_bytes: int
    ceiling: int = 0

    @property
    def requests(self) -> int:
        """Return the number of the group's requests in the recorded step."""
        return len(self.mallocs)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromisedBytes:
    """The predictions of a plan.

    Attributes:
        arena_bytes: bytes reserved: the height of the solution.
        static_peak_bytes: the most bytes that planned requests and the room have at once: the problem's lower bound.
        dynamic_peak_bytes: the most bytes that dynamic requests had in use at once in the recorded step.
        live_peak_bytes: the most bytes that a recorded step had in use at once, with its dynamic requests.
        fragmentation: 1 - static_peak_bytes / arena_bytes.
    """

    arena_bytes: int
    static_peak_bytes: int
    dynamic_peak_bytes: int
    live_peak_bytes: int
    fragmentation: float


@dataclass(frozen=True, kw_only=True, eq=False)
class AddressPlan(PlanPart):
    """The arena's part of a plan.

    Attributes:
        problem: the planned requests. In a loaded part it has no fingerprint: only the plan has one.
        solution: the offsets of these requests.
        dynamic: one space for each group of requests whose sizes are known only at run time.
        predictions: see `PromisedBytes`.
    """

    name = "arena"
    problem: Problem
    solution: Solution
    dynamic: tuple[DynamicSpace, ...]
    predictions: PromisedBytes

    def to_file(self) -> dict[str, Any]:
        """Return the part's values for a file: first the values that people read, then the tables by column."""
        problem, solution = self.problem, self.solution
        assert solution.offsets.dtype == np.int64 and len(solution.offsets) == len(problem), "an offset for each buffer"
        return {
            "planner": solution.planner,
            "optimal": bool(solution.optimal),
            "timed_out": bool(solution.timed_out),
            "seconds": float(solution.seconds),
            "height_bytes": int(solution.height),
            "predictions": asdict(self.predictions),
            "phases": [{"kind": phase.kind.name.lower(), "micro_batch": phase.micro_batch} for phase in problem.phases],
            "layers": [asdict(layer) for layer in problem.layers],
            "terms": [list(term) for term in problem.terms],
            "dynamic": [asdict(group) for group in self.dynamic],
            "requests": len(problem),
            "buffers": {"id": problem.ids.tolist(), "offset": solution.offsets.tolist(), **_columns(problem.buffers)},
            "orderings": _columns(problem.orderings),
        }

    @classmethod
    def from_file(cls, values: dict[str, Any]) -> AddressPlan:
        """Return the part that a file's values describe; see `PlanPart.from_file`."""
        tables = "buffers", "orderings"
        head = read(_PartHeader, {name: value for name, value in values.items() if name not in tables})
        buffers, orderings = (values[name] for name in tables)
        if not 0 <= head.height_bytes < _MOST_BYTES:
            raise ValueError(f"the height is {head.height_bytes} bytes, not from 0 to 2**62 - 1")
        problem = Problem(
            buffers=_table(buffers, BUFFER, head.requests),
            ids=_ids(buffers["id"], head.requests),
            orderings=_table(orderings, ORDERING, len(orderings["time"])),
            phases=tuple(Phase(Pass[phase.kind.upper()], phase.micro_batch) for phase in head.phases),
            layers=head.layers,
            terms=head.terms,
        )
        for name in _PLACES:
            rows = problem.buffers[name]
            if (rows < -1).any() or (rows >= len(head.phases if name.endswith("phase") else head.layers)).any():
                raise ValueError(f"the column {name} has an index beyond the plan's phases or layers")
        solution = Solution(
            offsets=_column(buffers, "offset", np.dtype(np.int64), head.requests),
            height=head.height_bytes,
            planner=head.planner,
            optimal=head.optimal,
            seconds=head.seconds,
            timed_out=head.timed_out,
        )
        return cls(problem=problem, solution=solution, dynamic=head.dynamic, predictions=head.predictions)

    @property
    def efficiency(self) -> float | None:
        """Return the share of the arena that is in use at the recorded steps' peak.

        None: the plan has no room for its dynamic requests, so that torch reserves an unknown number of bytes for them.
        """
        height = self.solution.height
        if not height or (self.dynamic and not self.problem.room_bytes):
            return None
        return self.predictions.live_peak_bytes / height

    def does_as(self, other: AddressPlan) -> bool:
        """Return whether both parts give the same requests the same addresses, and dynamic groups the same spaces."""
        return (
            np.array_equal(self.problem.buffers, other.problem.buffers)
            and np.array_equal(self.solution.offsets, other.solution.offsets)
            and self.dynamic == other.dynamic
        )

    def alone(self) -> MemoryPlan:
        """Return a plan with these addresses and nothing else."""
        return MemoryPlan(fingerprint=self.problem.fingerprint).with_part(self)


def address_plan(
    problem: Problem,
    solution: Solution,
    dynamic: tuple[DynamicSpace, ...] = (),
    dynamic_peak_bytes: int = 0,
    live_peak_bytes: int = 0,
) -> AddressPlan:
    """Return the arena's part of a plan for a solved problem, with its predictions.

    Args:
        problem: the planned requests.
        solution: their offsets.
        dynamic: the spaces of dynamic requests.
        dynamic_peak_bytes: see `PromisedBytes`.
        live_peak_bytes: see `PromisedBytes`; at least what planned requests have in use is taken.
    """
    return AddressPlan(
        problem=problem,
        solution=solution,
        dynamic=dynamic,
        predictions=PromisedBytes(
            arena_bytes=solution.height,
            static_peak_bytes=problem.lower_bound,
            dynamic_peak_bytes=dynamic_peak_bytes,
            live_peak_bytes=max(live_peak_bytes, dynamic_peak_bytes, problem.requested_peak_bytes),
            fragmentation=fragmentation(problem.lower_bound, solution.height),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """A `Phase` in a file, where its kind is a name."""

    kind: str
    micro_batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _PartHeader:
    """The part's values in a file, except the tables."""

    planner: str
    optimal: bool
    timed_out: bool
    seconds: float
    height_bytes: int
    requests: int
    predictions: PromisedBytes
    phases: tuple[_Phase, ...]
    layers: tuple[Layer, ...]
    terms: tuple[tuple[int, ...], ...]
    dynamic: tuple[DynamicSpace, ...]


def _columns(table: np.ndarray) -> dict[str, list[int]]:
    """Return the columns by name, booleans as 0 and 1."""
    return {name: table[name].astype(np.int64).tolist() for name in table.dtype.names}


def _table(columns: dict[str, Any], dtype: np.dtype, rows: int) -> np.ndarray:
    table = np.empty(rows, dtype)
    for name in dtype.names:
        table[name] = _column(columns, name, dtype[name], rows)
    return table


def _column(columns: dict[str, Any], name: str, dtype: np.dtype, rows: int) -> np.ndarray:
    values = columns[name]
    if not isinstance(values, list) or len(values) != rows or not set(map(type, values)) <= {int}:
        raise ValueError(f"the column {name} is not {rows} integers")
    array = np.array(values, np.int64)
    bounds = (0, 1) if dtype == np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if rows and not (bounds[0] <= array.min() and array.max() <= bounds[1]):
        raise ValueError(f"the column {name} has values that are not of type {dtype}")
    return array.astype(dtype)


def _ids(values: Any, rows: int) -> np.ndarray:
    if not isinstance(values, list) or len(values) != rows:
        raise ValueError(f"the column id is not {rows} ids")
    kinds = set(map(type, values))
    if kinds == {str}:
        return np.array(values, np.str_)
    return _column({"id": values}, "id", np.dtype(np.int64), rows)
