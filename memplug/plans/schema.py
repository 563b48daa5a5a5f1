"""A plan of one program on one rank: what it was made from, and a part of each technique."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from memplug.errors import LayoutError
from memplug.plans.values import read
from memplug.profile.records import Fingerprint

FORMAT = 7
"""Version of the files that `plan_file.save` writes."""

DAMAGED = "Make the plan again with `memplug plan`, or copy it again from where it was made; a plan is not edited."

Part = TypeVar("Part", bound="PlanPart")


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
class TrainingPart:
    """What a run goes on from, whatever its techniques are.

    Attributes:
        run: that made the plan; later ones sort behind earlier ones.
        index: of the program among those of its run, in the order in which they came.
        program: None where steps are not compared: there are no decisions then.
        first: what the first step of a run is like, where that is another program: ZeRO 3 learns in it in which order
            parameters are used.
        gradients_stay: parameters keep their gradients' memory from step to step.
    """

    run: str
    index: int
    program: PlannedProgram | None
    first: PlannedProgram | None = None
    gradients_stay: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryPlan:
    """All that memplug does in one rank's step.

    Attributes:
        fingerprint: of the recorded step.
        training: of a plan that was made while training; None: of `memplug plan`, which plans addresses alone.
        parts: by the technique's name: as made here, or as JSON had them until `PlanPart.of` reads them. Parts of
            techniques that are not there stay unread.
        file: that it was loaded from; None: it was made here.
    """

    fingerprint: Fingerprint
    training: TrainingPart | None = None
    parts: Mapping[str, PlanPart | dict[str, Any]] = field(default_factory=dict)
    file: Path | None = None

    def with_part(self, part: PlanPart) -> MemoryPlan:
        """Returns the plan with a part, in place of the one that the technique had."""
        return replace(self, parts={**self.parts, part.name: part})


class PlanPart:
    """One technique's part of a plan: a dataclass in the technique's room, in `plan`, which knows no torch.

    Attributes:
        name: of the technique.
    """

    __slots__ = ()
    name: ClassVar[str]

    def to_file(self) -> dict[str, Any]:
        """Returns the part as what JSON has, and numpy's numbers and frozen sets."""
        return asdict(self)

    @classmethod
    def from_file(cls: type[Part], values: dict[str, Any]) -> Part:
        """Returns the part that a file has; raises ValueError, KeyError or the like for anything else."""
        return read(cls, values)

    @classmethod
    def of(cls: type[Part], plan: MemoryPlan) -> Part | None:
        """Returns the technique's part of a plan; None: it has none.

        Raises:
            LayoutError: it is something else.
        """
        part = plan.parts.get(cls.name)
        if part is None or isinstance(part, cls):
            return part
        try:
            return cls.from_file(part)
        except Exception as error:
            # The digest is right, and may have been made so: the fields may hold anything.
            reason = f"in its part {cls.name}: {type(error).__name__}: {error}"
            raise LayoutError(f"{plan.file}: not a plan that memplug has written: {reason}", DAMAGED) from error

    def does_as(self: Part, other: Part) -> bool:
        """Returns whether training does the same by another part, whatever was measured and predicted."""
        return self == other
