"""A plan of one program on one rank: its decisions, the addresses of its requests, and what to expect of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memplug.plan.decisions import Decisions
from memplug.plan.layout.problem import Problem, Solution, fragmentation

FORMAT = 6
"""Version of the files that `plan_file.save` writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSpace:
    """What requests of one HomoLayer group may reuse of the arena (STWeaver, section 5.2, Eq. 2 to 5).

    Attributes:
        malloc_phase, malloc_layer, free_phase, free_layer: of the group's requests, into the problem's phases and
            layers; -1: outside of layers, or (free_) not freed in the step.
        stream: that they are asked for on.
        lower, upper: on the problem's clock; the group's requests live inside of it.
        spaces: (first byte, end) of what no planned buffer uses in that time; disjoint, rising, none empty.
        members: of the dynamic requests that the group's malloc place had in the recorded step, which ones are the
            group's: running numbers from 0, rising.
        peak_bytes: the most that the group had in use at once, in the recorded step.
    """

    malloc_phase: int
    malloc_layer: int
    free_phase: int
    free_layer: int
    stream: int
    lower: int
    upper: int
    spaces: tuple[tuple[int, int], ...]
    members: tuple[int, ...]
    peak_bytes: int

    @property
    def requests(self) -> int:
        """Of the group, in the recorded step."""
        return len(self.members)


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """What the plan promises, in bytes.

    Attributes:
        arena_bytes: that are reserved: the height of the solution.
        static_peak_bytes: the most that planned requests have in use at once: the problem's lower bound.
        dynamic_peak_bytes: the most that dynamic requests had in use at once, in the recorded step.
        fragmentation: 1 - static_peak_bytes / arena_bytes.
    """

    arena_bytes: int
    static_peak_bytes: int
    dynamic_peak_bytes: int
    fragmentation: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedProgram:
    """The step that decisions were made from, which a later run's first step is compared with.

    Attributes:
        names: of operators.
        operators: of the step, in order, as indices into `names`; None where they were not watched.
        sizes, nodes, unseen: see `memplug.profile.similarity.Program`.
    """

    names: tuple[str, ...]
    operators: tuple[int, ...] | None
    sizes: tuple[tuple[int, ...], ...]
    nodes: int
    unseen: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What a run goes on from.

    Attributes:
        run: that made the plan; later ones sort behind earlier ones.
        index: of the program among those of its run, in the order in which they came.
        program: None where steps are not compared: nothing is planned but addresses.
        first: what the first step of a run is like, where that is another program: ZeRO 3 learns in it in which order
            parameters are used.
        decisions: operator by operator; None likewise.
        gradients_stay: parameters keep their gradients' memory from step to step.
        d2h_bytes_per_s, h2d_bytes_per_s: of the link that the decisions were made for; 0 without any.
    """

    run: str
    index: int
    program: PlannedProgram | None
    decisions: Decisions | None
    first: PlannedProgram | None = None
    gradients_stay: bool
    d2h_bytes_per_s: float = 0.0
    h2d_bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryPlan:
    """All that memplug does in one rank's step.

    Attributes:
        problem: the planned requests, with the fingerprint of what was recorded; none where no arena served it.
        solution: their offsets.
        dynamic: one for each group of requests whose sizes are known only at run time.
        predictions: see there.
        training: of a plan that was made while training; None: of `memplug plan`, which plans addresses alone.
        parts: of techniques other than swapping, recomputing and addresses, by name; of what JSON has.
    """

    problem: Problem
    solution: Solution
    dynamic: tuple[DynamicSpace, ...]
    predictions: Predictions
    training: Training | None = None
    parts: dict[str, Any] = field(default_factory=dict)

    @property
    def has_addresses(self) -> bool:
        """False: no arena served the program, and the plan is of decisions alone."""
        return len(self.problem) > 0


def memory_plan(
    problem: Problem, solution: Solution, dynamic: tuple[DynamicSpace, ...] = (), dynamic_peak_bytes: int = 0
) -> MemoryPlan:
    """A plan of these parts, with its predictions."""
    return MemoryPlan(
        problem=problem,
        solution=solution,
        dynamic=dynamic,
        predictions=Predictions(
            arena_bytes=solution.height,
            static_peak_bytes=problem.lower_bound,
            dynamic_peak_bytes=dynamic_peak_bytes,
            fragmentation=fragmentation(problem.lower_bound, solution.height),
        ),
    )
