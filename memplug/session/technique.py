"""The interface of a technique: a way to save memory, in a room of its own, with four verbs.

The session calls them; techniques do not know each other.

propose ──a part of the plan──► judge ──accepted──► install ──► withdraw
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from memplug.config import MemplugConfig
from memplug.plans.schema import MemoryPlan, PlanPart
from memplug.profile.recorder import Detail
from memplug.profile.similarity import Program
from memplug.profile.trace import Trace
from memplug.session.given import AgreedGiven, Given
from memplug.session.technique_report import TechniqueReport

Part = TypeVar("Part")
"""One technique's part of a plan, in force or proposed; two parts are the same only if they are one object."""


class Technique(abc.ABC, Generic[Part]):
    """One technique of one session. Each part is made for one program, and installed again when the program returns.

    Attributes:
        part_type: type of its parts in the plans that are kept from run to run.
        mistakes_of: the judge: yields the mistakes of a part, as sentences. Shares no code with the planner.
        name: name of its part in plans, and of its report.
        report_type: type of its reports.
        off_because: why training goes on without it; "" while it may have a part in force.
        whole_steps: number of whole steps that ran under the present key (see `turn`); counted by the technique's
            `Follower`.
        growth: size of the largest step that the program is made for, over that of the step that ended; 1 if larger
            ones may follow.
        joins_late: whether `begin_step` was called within the step, as its first forward began.
        serves: True if it serves requests for memory, from memory of its own.
        relieves: True if it makes steps that exceed the device budget fit, or reports why they cannot.
        has_served_whole: True if it served the whole of the step that ended last.
    """

    name: ClassVar[str]
    part_type: ClassVar[type[PlanPart]]
    mistakes_of: ClassVar[Callable[[Any], Iterator[str]]]
    report_type: ClassVar[type[TechniqueReport]] = TechniqueReport
    serves: ClassVar[bool] = False
    relieves: ClassVar[bool] = False
    off_because = ""
    whole_steps = 0
    growth = 1.0
    joins_late = False
    has_served_whole = False

    @classmethod
    def is_wanted(cls, config: MemplugConfig) -> bool:
        """Return whether the block asks for the technique, in the section of its name."""
        return config.asks_for(cls.name)

    @classmethod
    def make(cls, given: Given) -> Technique[Part]:
        """Make the technique for a session that has the recorder.

        Args:
            given: what the session provides.

        Raises:
            MemplugError: the technique cannot work here.
        """
        return cls()

    # -- the four verbs ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def propose(self, trace: Trace | None) -> Part | None:
        """Return a part for the program whose step ended, or None to be asked again after the next step.

        The first call begins the work, and later calls continue it. A part that is proposed while another is in force
        replaces that one. Long work runs beside training: no step waits for it.

        Args:
            trace: the trace of the step, if it was recorded as `detail` asks.

        Raises:
            MemplugError: there will be no part.
        """

    def judge(self, part: Part) -> str:
        """Return the first mistake of a part, proposed now or kept by an earlier run; "" if it may be installed."""
        return next(self.mistakes_of(part), "")

    @abc.abstractmethod
    def install(self, part: Part) -> None:
        """Put a part into force from the next step on; it replaces any other.

        Args:
            part: the part to install.

        Raises:
            MemplugError: this machine does not allow it; then nothing is in force.
        """

    @abc.abstractmethod
    def withdraw(self) -> None:
        """Take the part out of force from the next step on."""

    # -- programs that take turns --------------------------------------------------------------------------------------

    def turn(self, key: Hashable) -> None:
        """Go on with the work for `key`, which stands for a program; the unfinished work for other keys stays.

        From the next step on, or from the step that begins, the four verbs are about this key. The caller then installs
        the key's part, or withdraws the part of another key.

        Args:
            key: the program of the step, with the parts of earlier techniques; None if it is unknown or not stable.
        """

    def forget(self, key: Hashable) -> None:
        """Drop the work for `key`, finished or not: it will not be turned to again."""

    # -- requirements during a step ------------------------------------------------------------------------------------

    @property
    def detail(self) -> Detail | None:
        """Return the detail in which the technique needs the next step recorded; None if it needs no record."""
        return None

    def scales(self, part: Part) -> bool:
        """Return whether a part serves steps whose inputs have other sizes than the step that it is made for."""
        return False

    @property
    def needs_places(self) -> bool:
        """Return whether the technique needs the places of the next step reported, even if it is not recorded."""
        return False

    def begin_step(self) -> None:
        """Prepare for the next step; called just before it starts."""

    def end_step(self) -> None:
        """Stop serving the step; called when it ends, before any other action."""

    def report(self) -> TechniqueReport:
        """Return what the technique did, holds and predicts.

        Any thread may call this, even inside of a request for memory that fails.
        """
        return self.report_type.absent(self.off_because)

    # -- from run to run -----------------------------------------------------------------------------------------------

    def kept(self, plan: MemoryPlan) -> Part | None:
        """Return the part that an earlier run put into a plan; None if it has none.

        Args:
            plan: the plan of the earlier run.

        Raises:
            LayoutError: the plan has something else under the technique's name.
        """
        return self.part_type.of(plan)

    def keep(self, part: Part, plan: MemoryPlan) -> MemoryPlan:
        """Return the plan with this part added."""
        return plan.with_part(part)


class AgreedTechnique(Technique[Part]):
    """A technique whose parts change which collectives run, so all ranks have to switch together.

    All ranks propose, install and withdraw at the same steps; they agree on these steps in `memplug.session.adjuster`.
    A session has one such technique from its beginning, and it decides how regions run. Its keys are the programs, and
    it remembers which part is in force for each: `turn` suffices to put it into force again.

    Attributes:
        plans: True if it proposes; else regions run under fixed decisions, or there are no regions.
        unwatched_because: why it does not need steps compared by their operators; "" if it does.
        executor: runs the regions, as hooks request.
        plain: the regions that currently run as if memplug were absent.
        may_keep: True if a part may rely on later steps being no larger than the step that it was made from.
        share_of: returns the size of a step over that of the largest step that the next part is made for; None if
            nothing shows it.
        outcome: how proposing ended, in words for the log.
    """

    plans: bool
    unwatched_because: str
    executor: Any
    plain: Any
    may_keep = True
    share_of: Callable[[Program], float | None] = staticmethod(lambda program: 1.0)
    outcome = ""

    @abc.abstractmethod
    def __init__(self, given: AgreedGiven):
        """Begin with nothing in force."""

    @abc.abstractmethod
    def beginning(self) -> str:
        """Return how the technique begins, in words for the log."""

    # -- programs that take turns --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def turn(self, key: Hashable) -> None:
        """Run by the part, or by the next trial, of this program from now on; None: at the safest setting."""

    @property
    @abc.abstractmethod
    def is_free(self) -> bool:
        """Return whether this rank may turn alone from the present key, since no collective depends on it."""

    @abc.abstractmethod
    def turn_freely(self, key: Hashable) -> bool:
        """Turn on this rank alone, at the beginning of a step's first forward, if no collective depends on that.

        Returns:
            False, with nothing changed, if other ranks may run other collectives then.
        """

    @abc.abstractmethod
    def advance(self, step: int) -> Part | None:
        """Go on proposing by the measurements of a step of the program; all ranks call this for the same steps.

        Args:
            step: number of the step, as in `agree`.

        Returns:
            The part, once it is found.
        """

    # -- in a step, and once it is over --------------------------------------------------------------------------------

    @abc.abstractmethod
    def begin_program(self) -> None:
        """Prepare for the step's first forward with gradients."""

    @abc.abstractmethod
    def program(self, operators: np.ndarray | None, nodes: int) -> Program:
        """Return the program of the step that ended.

        Args:
            operators: the operators in order, as numbers; None if the step was not watched.
            nodes: number of autograd nodes that the step made.
        """

    @abc.abstractmethod
    def agree(self, step: int, program: Program, planned_from: Program | None, is_stable: bool) -> None:
        """Run the checks for which ranks exchange values; all ranks call this before they vote on the program.

        Args:
            step: number of the step that ended.
            program: the program of the step that ended.
            planned_from: the program that the part in force was made for; None without one.
            is_stable: True in the stage stable.

        Raises:
            RanksError: another rank is missing.
        """

    @abc.abstractmethod
    def settle(self, is_stable: bool, is_served: bool) -> None:
        """Put the next step's decisions into effect.

        Args:
            is_stable: True in the stage stable.
            is_served: True if another technique serves requests for memory, or will.
        """

    @abc.abstractmethod
    def turn_away(self) -> None:
        """Leave the part out of the step that begins, because the part was made for other inputs."""

    @property
    @abc.abstractmethod
    def may_talk(self) -> bool:
        """Return whether collectives depend on the part in force."""

    @abc.abstractmethod
    def stay(self) -> None:
        """Stop sharing decisions between ranks: regions keep their present settings."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release all memory."""

    # -- values for other techniques -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def layer_bytes(self) -> dict[str, int]:
        """Return the bytes that the last forward of each layer offloaded; see `memplug.session.given.Given`."""

    @abc.abstractmethod
    def free_host_bytes(self) -> int:
        """Return the bytes of the host budget that are still free."""

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def has_run(self) -> bool:
        """Return whether a region or other module that the technique decides on has run forward with gradients."""

    @abc.abstractmethod
    def has_lost_room(self) -> bool:
        """Return whether some rank has too little memory for the part in force; all ranks call this after a step."""

    @abc.abstractmethod
    def retain(self, parts: Iterable[Part]) -> None:
        """Release memory that none of `parts` needs: no other part will be installed again."""

    @abc.abstractmethod
    def in_words(self, part: Part) -> str:
        """Return a part in words, for the log."""

    @abc.abstractmethod
    def lacks(self, part: Part) -> str:
        """Return why this machine has no room for a part of an earlier run; "" if it has."""

    @abc.abstractmethod
    def reserve(self, parts: Iterable[Part]) -> None:
        """Reserve the host memory that the largest of the parts needs."""
