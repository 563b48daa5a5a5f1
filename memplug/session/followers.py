"""Drives techniques that follow the program: each makes a part of the plan for every program that lasts.

waiting ──a program lasts long enough──► proposing ──accepted──► in force
   ▲                                                                 │
   └───── another program, or a new part of an earlier technique ────┘

A program lasts once its stage is stable. Techniques propose in order: each plans for steps that run under the parts of
the techniques before it. So a technique remembers its parts by a key, which stands for the program and those earlier
parts. While programs take turns, the work for one key rests as long as steps run under others. Each rank does all this
by itself, since no collective depends on these parts.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from memplug.errors import LayoutError, MemplugError, coded
from memplug.plans.schema import MemoryPlan
from memplug.profile.recorder import Detail
from memplug.profile.trace import Trace
from memplug.session.technique import Technique

log = logging.getLogger("memplug")

Program = TypeVar("Program", bound=Hashable)

MOST_PARTS = 8
"""Number of parts that memplug remembers for each technique, such as one for each sequence length."""


@dataclass(frozen=True, slots=True, eq=False)
class _After:
    """The key of a technique: the previous technique's key and part. The first technique's key is a `Lasting`.

    Attributes:
        key: the previous technique's key.
        part: the previous technique's part in force. Two parts are equal only if they are one object.
    """

    key: Hashable
    part: Any

    def __eq__(self, other: object) -> bool:
        """Return whether both have equal keys and the same part object."""
        return isinstance(other, _After) and self.key == other.key and self.part is other.part

    def __hash__(self) -> int:
        """Return a hash of the key and the part's identity."""
        return hash((self.key, id(self.part)))


@dataclass(eq=False, slots=True)
class _KeyWork:
    """The work of a follower for one key.

    Attributes:
        part: the part of the plan; None before there is one.
        steps: number of steps that began with the key.
        begun: whether the technique has begun to propose.
    """

    part: Any = None
    steps: int = 0
    begun: bool = False


class Follower:
    """Decides when one technique proposes, and which of its parts is in force.

    The technique has at most one part for each key, and keeps what it has for a key while steps run under others.

    Args:
        technique: the technique that proposes.
        warmup_steps: number of steps that a program runs before the technique proposes for it.

    Attributes:
        part: the part in force, or None.
        key: the key of the step that runs, or is the next to run.
    """

    def __init__(self, technique: Technique[Any], warmup_steps: int):
        self.technique = technique
        self.part: Any = None
        self.key: Hashable = None
        self._warmup_steps = warmup_steps
        self._works: collections.OrderedDict[Hashable, _KeyWork] = collections.OrderedDict()

    def resume(self, parts: Mapping[Hashable, Any], key: Hashable) -> None:
        """Resume with parts that an earlier run kept: the one for `key` is in force from the next step on.

        Args:
            parts: the kept parts by key.
            key: the key to begin with.
        """
        self._works.update({each: _KeyWork(part, begun=True) for each, part in parts.items()})
        self.enter(key)

    def enter(self, key: Hashable) -> None:
        """Switch to a step's key: install its part, or withdraw the part in force.

        Args:
            key: the key of the next step, or of the one that begins; None if its program is unknown or does not last.
        """
        if key == self.key or self.technique.off_because:
            return
        was_begun = self.key in self._works and self._works[self.key].begun
        self.key = key
        self.technique.turn(key)
        work = self._work
        self.technique.whole_steps = work.steps
        if work.part is not None:
            self._install(work.part)
        elif was_begun:
            self.technique.withdraw()
            self.part = None

    def end_step(self, ran: bool, trace: Trace | None, growth: float = 1.0) -> None:
        """Let the technique propose for the key of the step that ended, once the program has lasted long enough.

        Args:
            ran: whether the step ran the program of its key, as far as this rank knows.
            trace: the trace of the step; None if it was not recorded.
            growth: see `Technique`.
        """
        if self.technique.off_because or self.key is None or not ran:
            return
        work = self._work
        work.steps += 1
        self.technique.whole_steps, self.technique.growth = work.steps, growth
        if work.begun or work.steps >= self._warmup_steps:
            work.begun = True
            self._propose(trace)

    def begin_proposing(self) -> None:
        """Let the technique begin to propose for the key of the next step, if the program has lasted long enough."""
        if self.technique.off_because or self.key is None:
            return
        work = self._work
        if not work.begun and work.steps >= self._warmup_steps:
            work.begun = True
            self._propose(None)

    def retain(self, is_live: Callable[[Any], bool]) -> set[Hashable]:
        """Forget all keys for which `is_live` is false, except the present one; return the next technique's keys."""
        for key in [each for each in self._works if each != self.key and not is_live(each)]:
            del self._works[key]
            self.technique.forget(key)
        return {_After(key, work.part) for key, work in self._works.items() if work.part is not None}

    def close(self, why: str) -> None:
        """Withdraw the part in force, and propose nothing more.

        Args:
            why: the reason, for the report.
        """
        self.technique.off_because = why
        self.technique.withdraw()
        self.part = None
        while self._works:
            self.technique.forget(self._works.popitem()[0])

    def key_after(self, key: Hashable) -> Hashable:
        """Return the next technique's key, made from this technique's `key`; None while this one has no part."""
        if self.technique.off_because:
            return key
        return _After(key, self.part) if self.part is not None else None

    @property
    def _work(self) -> _KeyWork:
        """Return the work of the present key; forget the key that was left longest ago if there are too many."""
        if self.key is None:
            return _KeyWork()
        work = self._works.setdefault(self.key, _KeyWork())
        self._works.move_to_end(self.key)
        while len(self._works) > MOST_PARTS:
            self.technique.forget(self._works.popitem(last=False)[0])
        return work

    def _propose(self, trace: Trace | None) -> None:
        try:
            part = self.technique.propose(trace)
        except MemplugError as error:
            self._fail(error)
            return
        if part is None:
            return
        if wrong := self.technique.judge(part):
            text = f"the judge refuses the plan: {wrong}"
            self._fail(LayoutError(text, "Please report it, with a trace.", code="MP016"))
            return
        self._work.part = part
        self._install(part)

    def _install(self, part: Any) -> None:
        try:
            self.technique.install(part)
        except MemplugError as error:
            self._fail(error)
        else:
            self.part = part

    def _fail(self, error: MemplugError) -> None:
        log.warning("memplug: goes on without the %s: %s", self.technique.name, error)
        self.close(error.problem)


class Followers:
    """All techniques of a session that follow the program, in the order in which they take effect.

    Args:
        techniques: each technique, with the `warmup_steps` of its `Follower`.
    """

    def __init__(self, techniques: Iterable[tuple[Technique[Any], int]] = ()):
        self._all = [Follower(technique, warmup_steps) for technique, warmup_steps in techniques]
        self._key: Hashable = None
        self._techniques = {each.technique.name: each.technique for each in self._all}

    def __iter__(self) -> Iterator[Follower]:
        """Iterate over the followers, in the order in which they take effect."""
        return iter(self._all)

    def find(self, name: str) -> Technique[Any] | None:
        """Return the technique of this name; None if the session has none."""
        return self._techniques.get(name)

    def resume(self, plans: Mapping[Program, MemoryPlan], program: Program) -> dict[Program, dict[str, Any]]:
        """Resume with an earlier run's plans; the plan of `program` is in force from the next step on.

        Returns:
            The parts to resume from, by program and by technique.
        """
        self._key = program
        keys: dict[Program, Hashable] = {each: each for each in plans}
        found: dict[Program, dict[str, Any]] = {each: {} for each in plans}
        for follower in self._all:
            technique = follower.technique
            if technique.off_because:
                continue
            parts = {each: _kept(technique, plan) for each, plan in plans.items() if keys[each] is not None}
            parts = {each: part for each, part in parts.items() if part is not None}
            follower.resume({keys[each]: part for each, part in parts.items()}, keys[program])
            for each in plans:
                keys[each] = _After(keys[each], parts[each]) if each in parts else None
            for each, part in parts.items():
                found[each][technique.name] = part
        return found

    @property
    def scale(self) -> bool:
        """Return whether all parts in force serve steps whose inputs have other sizes."""
        return all(each.part is None or each.technique.scales(each.part) for each in self._all)

    def enter(self, key: Hashable) -> None:
        """Switch all techniques to the program of the next step, or of the step that begins.

        Args:
            key: the program with its decisions; None if it does not last.
        """
        self._key = key
        for follower in self._all:
            follower.enter(key)
            key = follower.key_after(key)

    def end_step(self, key: Hashable, trace: Trace | None, ran: bool = True, growth: float = 1.0) -> None:
        """Let each technique propose for the program of the step that ended, and switch to that of the next step.

        Args:
            key: the program of the next step with its decisions; None if it does not last.
            trace: the trace of the step that ended; None if it was not recorded.
            ran: whether the step ran the program that was entered for it.
            growth: see `Technique`.
        """
        ended = self._key
        for follower in self._all:
            # the work under a part that an earlier technique has just replaced is over
            follower.end_step(ran and follower.key == ended, trace, growth)
            ended = follower.key_after(ended)
        self._key = key
        for follower in self._all:
            follower.enter(key)
            follower.begin_proposing()
            key = follower.key_after(key)

    def retain(self, is_live: Callable[[Any], bool]) -> None:
        """Drop the work for programs and decisions that will not come again.

        Args:
            is_live: whether steps may run under this program with its decisions again.
        """
        live: set[Hashable] | None = None
        for follower in self._all:
            if not follower.technique.off_because:
                live = follower.retain(is_live if live is None else live.__contains__)

    def close(self, why: str) -> None:
        """Withdraw all parts: the session is detached, or steps can no longer be recorded."""
        for follower in self._all:
            follower.close(why)

    @property
    def detail(self) -> Detail | None:
        """Return the most detail in which a technique needs the next step recorded; None if none needs a record."""
        return max((each.technique.detail for each in self._all if each.technique.detail is not None), default=None)

    @property
    def need_places(self) -> bool:
        """Return whether a technique needs the places of the next step's requests, even if the step is not recorded."""
        return any(each.technique.needs_places for each in self._all)

    @property
    def parts(self) -> dict[str, Any] | None:
        """Return the parts in force, by technique; None while a technique has no part yet."""
        active = [each for each in self._all if not each.technique.off_because]
        if any(each.part is None for each in active):
            return None
        return {each.technique.name: each.part for each in active}


def _kept(technique: Technique[Any], plan: MemoryPlan) -> Any:
    """Return the technique's part of an earlier run; None if there is none, or the judge refuses it."""
    try:
        part = technique.kept(plan)
        wrong = technique.judge(part) if part is not None else ""
    except LayoutError as error:
        wrong = error.problem
    if wrong:
        text = "memplug: a kept plan's part for the %s is not used: %s. This run makes its own"
        log.warning(coded("MP014", text), technique.name, wrong)
    return None if wrong else part
