"""A program that steps ran, as a session remembers it: its stage, its plan, and the sizes that it is made for."""

from __future__ import annotations

from typing import Any

from memplug.profile.similarity import Program
from memplug.session.inputs import elements, growth_of
from memplug.session.table import Stage

MOST_BEGINNINGS = 16
"""Number of inputs remembered for each program, by which its steps are recognised when they begin."""

MOST_TURNS = 2
"""Number of turns after which memplug plans no more for a program. A turn: under a plan, it ran as another one."""


class Remembered:
    """A program that a step ran, its stage, and the plan for it.

    Attributes:
        index: the program's bit in a vote.
        family: number of its family, the same on all ranks; the name of one from an earlier run.
        extent: largest size of the steps that it is made for, over that of its family's first program; the same on all
            ranks.
        reach: the same size on this rank, over the size of `baseline`.
        stage: the program's stage.
        steps: number of its steps since it was first seen, or since its plan was dropped: StableStep in Algorithm 1.
        baseline: the step of this rank that later steps are compared with. During warm-up it is the latest step. From
            planning on it stays the same, so that a slow drift adds up to a change.
        nodes: the fewest and the most autograd nodes of watched steps that ran the program.
        decisions: the part of the agreed technique to run the program under; None before there is one.
        begins: shapes and dtypes of the inputs that this rank's steps began with, the latest last; with each, the
            size of the step over the largest that the program is made for, None if unknown.
        unwatched: number of this rank's steps of the program since its operators were last watched.
        plans: number of plans that the run had made when it made the program's.
        is_proven: True once a step with watched operators ran the program under its plan.
        is_mixed: True once a step of a rank had forwards of several sizes.
        is_genuine: True once a step ran the program under other settings than another program's plan.
        told: changes of stage that the log has already reported for the program.
        turns: number of times in a row that its steps ran as another program under a plan, each time the same.
    """

    def __init__(self, index: int, baseline: Program, family: int | str, extent: float = 1.0, reach: float = 1.0):
        self.index, self.family, self.extent, self.reach = index, family, extent, reach
        self.baseline = baseline
        self.nodes = (baseline.nodes, baseline.nodes)
        self.stage = Stage.WARM_UP
        self.steps = self.unwatched = self.plans = 0
        self.decisions: Any = None
        self.begins: dict[str, float | None] = {}
        self.is_proven = self.is_genuine = self.is_mixed = False
        self.told: set[object] = set()
        self.turns = 0
        self._became: Remembered | None = None

    def note_nodes(self, program: Program) -> None:
        """Count the nodes of a step that ran the program."""
        fewest, most = self.nodes
        self.nodes = min(fewest, program.nodes), max(most, program.nodes)

    @property
    def is_settled(self) -> bool:
        """Return whether the program has decisions, or stays at the safest setting for good."""
        return self.stage is Stage.STABLE

    def share(self, program: Program) -> float | None:
        """Return the size of a step over the largest that this program is made for; None if no region shows it."""
        ratio = program.over(self.baseline)
        return None if ratio is None else ratio / self.reach

    def note_beginning(self, inputs: str, program: Program | None = None) -> None:
        """Remember the inputs that a step of this rank began with.

        Args:
            inputs: shapes and dtypes of the inputs.
            program: the step; None: it was as large as the program's baseline.
        """
        share = self.share(program or self.baseline)
        if share is None:
            share = self.begins.get(inputs)
        self.begins.pop(inputs, None)
        self.begins[inputs] = share
        while len(self.begins) > MOST_BEGINNINGS:
            del self.begins[next(iter(self.begins))]

    def is_smaller(self, inputs: str, tolerance: float) -> bool:
        """Return whether inputs have more elements than any that the program's steps began with, beyond a tolerance."""
        largest = max(map(elements, self.begins), default=None)
        return largest is not None and elements(inputs) > (1 + tolerance) * largest

    def likely_share(self, inputs: str) -> float | None:
        """Return the `share` that a step probably has which begins with these inputs; None: none was like it."""
        if inputs in self.begins:
            return self.begins[inputs]
        for known, share in reversed(self.begins.items()):
            growth = growth_of(inputs, known)
            if share is not None and growth is not None:
                return share * growth
        return None

    def drop_plan(self) -> None:
        """Count the program's steps anew: it gets another plan."""
        self.decisions, self.steps, self.is_proven = None, 0, False

    def note_turn(self, other: Remembered) -> bool:
        """Count a turn: under a plan, steps ran as another program; now that it is withdrawn, they run as before.

        Args:
            other: the program that steps ran under the plan.

        Returns:
            True if no more plans are to be made for it.
        """
        self.turns = self.turns + 1 if self._became is other else 1
        self._became = other
        return self.turns >= MOST_TURNS
