"""What a technique is: a way to save memory, in a room of its own, that answers four verbs. The session says when;
techniques do not know each other.

propose ──a part of the plan──► judge ──accepted──► install ──► withdraw
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from memplug.config import MemplugConfig
from memplug.device.device import Device
from memplug.device.reserved import Reserved
from memplug.plans.schema import MemoryPlan, PlanPart
from memplug.profile.recorder import Detail
from memplug.profile.trace import Trace


@dataclass(frozen=True, slots=True)
class Given:
    """What a technique is made with.

    Attributes:
        config: the block.
        device: that trains.
        tell: the user, in one line of a level of logging.
        host_bytes: host memory that nothing else of the session holds, within its budget.
        reserved: beside the tensors of a step.
        explain: what is known as a request for device memory fails for good, for people; on any thread.
        layer_bytes: that the last forward of each layer sent to the host, and its backward got back.
        tensors: parameters and buffers of the model.
    """

    config: MemplugConfig
    device: Device
    tell: Callable[[str, int], None]
    host_bytes: Callable[[], int]
    reserved: Reserved
    explain: Callable[[], str]
    layer_bytes: Callable[[], Mapping[str, int]] = dict
    tensors: Callable[[], Iterable[torch.Tensor]] = tuple


Part = TypeVar("Part")
"""Of a plan, one technique's, in force or to be; two parts are the same only if they are one object."""


class Technique(abc.ABC, Generic[Part]):
    """Of one session. Parts are made for one program each, and installed again when that program comes again.

    Attributes:
        name: of its parts, in plans.
        part_type: of its parts, as plans keep them from run to run.
        mistakes_of: the judge of such parts: what is wrong with one, in sentences. Shares no code with what proposes.
        off_because: training goes on without it; "" while it may have a part in force.
        whole_steps: that were of the program that lasts, from their beginning on; counted by who asks.
    """

    name: ClassVar[str]
    part_type: ClassVar[type[PlanPart]]
    mistakes_of: ClassVar[Callable[[Any], Iterator[str]]]
    off_because = ""
    whole_steps = 0

    @classmethod
    def is_wanted(cls, config: MemplugConfig) -> bool:
        """Whether the block asks for it."""
        return True

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
    same steps, as `memplug.session.adjuster` has them agree.
    """

    may_keep = True
    """Whether parts may rely on the next step being no larger than the one that they are made of."""
    outcome = ""
    """How proposing ended, for people."""

    @abc.abstractmethod
    def has_lost_room(self) -> bool:
        """A step is over, on all ranks: whether the part in force asks for more than one of them can give any more."""

    @abc.abstractmethod
    def retain(self, parts: Iterable[Part]) -> None:
        """Only these may be installed again: what was held for others goes back."""

    @abc.abstractmethod
    def in_words(self, part: Part) -> str:
        """A part, for people."""
