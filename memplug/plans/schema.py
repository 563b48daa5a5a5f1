"""A plan of one program on one rank: its decisions, the addresses of its requests, and what to expect of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memplug.arena.plan.part import DynamicSpace, Predictions
from memplug.arena.plan.problem import Problem, Solution, fragmentation
from memplug.tokenwise.plan.decisions import Decisions

FORMAT = 6
"""Version of the files that `plan_file.save` writes."""


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
