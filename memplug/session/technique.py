"""What a technique is: a way to save memory, in a room of its own, that answers four verbs. The session says when;
techniques do not know each other.

propose ──a part of the plan──► judge ──accepted──► install ──► withdraw
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator
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
"""Of a plan, one technique's, in force or to be; two parts are the same only if they are one object."""


class Technique(abc.ABC, Generic[Part]):
    """Of one session. Parts are made for one program each, and installed again when that program comes again.

    Attributes:
        part_type: of its parts, as plans keep them from run to run.
        mistakes_of: the judge of such parts: what is wrong with one, in sentences. Shares no code with what proposes.
        name: of its parts in plans, and of its report.
        report_type: of its reports.
        off_because: training goes on without it; "" while it may have a part in force.
        whole_steps: that were of the program that lasts, from their beginning on; counted by who asks.
        serves: requests for memory, from memory of its own.
        relieves: makes a step fit that takes more of the device than its budget, or says why none can.
        has_served_whole: it served the step that ended last, and was withheld from no part of it.
    """

    name: ClassVar[str]
    part_type: ClassVar[type[PlanPart]]
    mistakes_of: ClassVar[Callable[[Any], Iterator[str]]]
    report_type: ClassVar[type[TechniqueReport]] = TechniqueReport
    serves: ClassVar[bool] = False
    relieves: ClassVar[bool] = False
    off_because = ""
    whole_steps = 0
    has_served_whole = False

    @classmethod
    def is_wanted(cls, config: MemplugConfig) -> bool:
        """Whether the block asks for it, in the section of its name."""
        return config.asks_for(cls.name)

    @classmethod
    def make(cls, given: Given) -> Technique[Part]:
        """One for a session that has the recorder.

        Raises:
            MemplugError: there can be none here.
        """
        return cls()

    # -- the four verbs ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def propose(self, trace: Trace | None) -> Part | None:
        """A step of a program that lasts is over: a part for it; None: ask again after the next step.

        The first call begins, and those after it go on, also while a part is in force, which the next one replaces.
        Whatever takes long runs beside training: no step waits for it.

        Args:
            trace: of the step, where it was recorded as `detail` asks.

        Raises:
            MemplugError: there will be none.
        """

    def judge(self, part: Part) -> str:
        """What is wrong with a part, proposed now or kept by an earlier run; "": it may be installed."""
        return next(self.mistakes_of(part), "")

    @abc.abstractmethod
    def install(self, part: Part) -> None:
        """In force from the next step on, in place of any other.

        Raises:
            MemplugError: the machine does not allow it; nothing is in force then.
        """

    @abc.abstractmethod
    def withdraw(self) -> None:
        """From the next step on nothing is in force, and nothing is proposed."""

    # -- what it may need ----------------------------------------------------------------------------------------------

    @property
    def detail(self) -> Detail | None:
        """How the next step is to be recorded for it; None: not at all."""
        return None

    @property
    def needs_places(self) -> bool:
        """Whether the next step has to say where in the program it is, recorded or not."""
        return False

    def begin_step(self) -> None:
        """Called just before the next step starts."""

    def end_step(self) -> None:
        """A step is over, and nothing else was done since."""

    def report(self) -> TechniqueReport:
        """Returns what it did, holds and promises. Called on any thread, also where a request for memory fails."""
        return self.report_type.absent(self.off_because)

    # -- from run to run -----------------------------------------------------------------------------------------------

    def kept(self, plan: MemoryPlan) -> Part | None:
        """The part that an earlier run has put into a plan; None: it has none.

        Raises:
            LayoutError: it is something else.
        """
        return self.part_type.of(plan)

    def keep(self, part: Part, plan: MemoryPlan) -> MemoryPlan:
        """The plan with this part."""
        return plan.with_part(part)


class AgreedTechnique(Technique[Part]):
    """One by which ranks do differently what all have to do alike: all of them propose, install and withdraw at the
    same steps, as `memplug.session.adjuster` has them agree. A session has one, from its beginning on, which decides
    how regions run.

    Attributes:
        plans: it proposes; else regions run by fixed decisions, or there are none.
        unwatched_because: operators of steps need not be compared for it; "": they have to be.
        executor: runs the regions, as hooks ask it to.
        plain: of these, those that run as without memplug.
        may_keep: parts may rely on the next step being no larger than the one that they are made of.
        outcome: how proposing ended, for people.
    """

    plans: bool
    unwatched_because: str
    executor: Any
    plain: Any
    may_keep = True
    outcome = ""

    @abc.abstractmethod
    def __init__(self, given: AgreedGiven):
        """Begin with nothing in force."""

    @abc.abstractmethod
    def beginning(self) -> str:
        """How it begins, for people."""

    # -- in a step, and once it is over --------------------------------------------------------------------------------

    @abc.abstractmethod
    def begin_program(self) -> None:
        """The step's first forward with gradients begins."""

    @abc.abstractmethod
    def program(self, operators: np.ndarray | None, nodes: int) -> Program:
        """Returns what the step that ended ran.

        Args:
            operators: in order, as numbers; None: the step was not watched.
            nodes: that autograd made.
        """

    @abc.abstractmethod
    def agree(self, program: Program, planned_from: Program | None, is_stable: bool) -> None:
        """Decide together what is no matter of parts; called on all ranks, before they vote on the program.

        Args:
            program: of the step that ended.
            planned_from: the one that the part in force is made for; None: there is none.

        Raises:
            RanksError: another rank is missing.
        """

    @abc.abstractmethod
    def settle(self, is_stable: bool, is_served: bool) -> None:
        """Put into force what the next step is to run by.

        Args:
            is_served: another technique serves requests for memory, or will.
        """

    @abc.abstractmethod
    def turn_away(self) -> None:
        """The step that begins has other inputs than the part in force was made for, which it does without."""

    @property
    @abc.abstractmethod
    def may_talk(self) -> bool:
        """Whether collectives depend on the part in force."""

    @abc.abstractmethod
    def stay(self) -> None:
        """Ranks decide nothing together any more: regions run on as they do."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give all memory back."""

    # -- what others plan with -----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def layer_bytes(self) -> dict[str, int]:
        """See `memplug.session.given.Given`."""

    @abc.abstractmethod
    def free_host_bytes(self) -> int:
        """Returns what is left of the host's budget."""

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def has_run(self) -> bool:
        """Whether anything that it decides on ran forward with gradients."""

    @abc.abstractmethod
    def has_lost_room(self) -> bool:
        """A step is over, on all ranks: whether the part in force asks for more than one of them can give any more."""

    @abc.abstractmethod
    def retain(self, parts: Iterable[Part]) -> None:
        """Only these may be installed again: what was held for others goes back."""

    @abc.abstractmethod
    def in_words(self, part: Part) -> str:
        """A part, for people."""

    @abc.abstractmethod
    def lacks(self, part: Part) -> str:
        """Why this machine has no room for a part of an earlier run; "" where it has."""

    @abc.abstractmethod
    def reserve(self, parts: Iterable[Part]) -> None:
        """Get the host memory that the largest of them needs."""
