"""A plan of one program on one rank: the data that it was made from, and a part for each technique."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from memplug.errors import LayoutError
from memplug.plans.values import read
from memplug.profile.records import Fingerprint

FORMAT = 12
"""Version of the files that `plan_file.save` writes."""

DAMAGED = "Make the plan again with `memplug plan`, or copy it again from where it was made; do not edit plans."

Part = TypeVar("Part", bound="PlanPart")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedProgram:
    """The step that decisions were made from; a later run compares its first step with it.

    Attributes:
        names: operator names.
        operators: operators of the step in order, as indices into `names`; None if memplug did not observe them.
        sizes: see `memplug.profile.similarity.Program`.
        nodes: see `memplug.profile.similarity.Program`.
        unseen: see `memplug.profile.similarity.Program`.
    """

    names: tuple[str, ...]
    operators: tuple[int, ...] | None
    sizes: tuple[tuple[int, ...], ...]
    nodes: int
    unseen: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPart:
    """The state that a run resumes from, apart from its techniques' parts.

    Attributes:
        run: name of the run that made the plan; names of later runs sort after those of earlier ones.
        index: index of the program among that run's programs, in order of first appearance.
        program: the planned program; None if the plan has no decisions, so that no step needs to match it.
        first: the program of the run's first step, if it has the same sizes as `program` and dissimilar operators;
            else None. ZeRO 3 makes them dissimilar: it learns the order of parameters in the first step.
        gradients_stay: True if parameters keep the memory of their gradients from step to step.
        plans: number of plans that the run had made when it made this one; the same on all ranks.
        family: name of the family of programs that differ in nothing but sizes, the same in all runs.
        is_mixed: True if steps of the program had forwards of several sizes.
        extent: size of the largest steps that the decisions are made for, over that of the family's first program.
        reach: the same size on this rank, over that of `program`.
        begins: inputs that its steps began with; for each, the size of the step over that of the largest.
    """

    run: str
    index: int
    program: PlannedProgram | None
    first: PlannedProgram | None = None
    gradients_stay: bool
    plans: int = 0
    family: str = ""
    is_mixed: bool = False
    extent: float = 1.0
    reach: float = 1.0
    begins: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryPlan:
    """All decisions and addresses for the steps of one rank.

    Attributes:
        fingerprint: fingerprint of the recorded step.
        training: the state to resume from; None for a plan of `memplug plan`, which has addresses alone.
        parts: the parts by name of the technique. A part that this process made is an object; a loaded one is a dict
            of JSON values, which `PlanPart.of` reads. Parts of techniques that this memplug lacks stay unread.
        file: the file that the plan was loaded from; None if this process made the plan.
    """

    fingerprint: Fingerprint
    training: TrainingPart | None = None
    parts: Mapping[str, PlanPart | dict[str, Any]] = field(default_factory=dict)
    file: Path | None = None

    def with_part(self, part: PlanPart) -> MemoryPlan:
        """Return a copy of the plan with this part; it replaces an earlier part of the technique."""
        return replace(self, parts={**self.parts, part.name: part})


class PlanPart:
    """One technique's part of a plan: a dataclass in the technique's `plan` folder, which imports no torch.

    Attributes:
        name: name of the technique.
    """

    __slots__ = ()
    name: ClassVar[str]

    def to_file(self) -> dict[str, Any]:
        """Return the part as values for JSON; `memplug.plans.values` converts numpy's numbers and frozen sets."""
        return asdict(self)

    @classmethod
    def from_file(cls: type[Part], values: dict[str, Any]) -> Part:
        """Return the part that a file's values describe; raise ValueError, KeyError or the like if they are wrong."""
        return read(cls, values)

    @classmethod
    def of(cls: type[Part], plan: MemoryPlan) -> Part | None:
        """Return the technique's part of a plan; None if it has none.

        Raises:
            LayoutError: the plan holds something else under the technique's name.
        """
        part = plan.parts.get(cls.name)
        if part is None or isinstance(part, cls):
            return part
        try:
            return cls.from_file(part)
        except Exception as error:
            # The fields may hold anything although the digest matches: a user may have changed both.
            reason = f"in its part {cls.name}: {type(error).__name__}: {error}"
            raise LayoutError(f"{plan.file}: not a plan that memplug has written: {reason}", DAMAGED) from error

    def does_as(self: Part, other: Part) -> bool:
        """Return whether both parts have the same effect on training; measurements and predictions may differ."""
        return self == other
