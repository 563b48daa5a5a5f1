"""Drives techniques that follow the program: each makes a part of the plan for every program that lasts.

waiting ──a program lasts long enough──► proposing ──accepted──► in force
   ▲                                                                 │
   └───── another program, or a new part of an earlier technique ────┘

A program lasts while the session is stable. Techniques propose in order: each plans for steps that run under the parts
of the techniques before it. So a technique remembers its parts by a key, which stands for the program and those earlier
parts. Each rank does all this by itself, since no collective depends on these parts.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping
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


class Follower:
    """Decides when one technique proposes, and which of its parts is in force.

    The technique has at most one part for each key.

    Args:
        technique: the technique that proposes.
        warmup_steps: number of steps that a program runs before the technique proposes for it.

    Attributes:
        part: the part in force, or None.
    """

    def __init__(self, technique: Technique[Any], warmup_steps: int):
        self.technique = technique
        self.part: Any = None
        self._warmup_steps = warmup_steps
        self._parts: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self._key: Hashable = None
        self._steps = 0  # number of `end_step` calls with this key
        self._begun = False

    def resume(self, parts: Mapping[Hashable, Any], key: Hashable) -> None:
        """Resume with parts that an earlier run kept: the one for `key` is in force from the next step on.

        Args:
            parts: the kept parts by key.
            key: the key to begin with.
        """
        self._parts.update(parts)
        self.enter(key)

    def enter(self, key: Hashable) -> None:
        """Switch to the next step's key: install its part, or withdraw the part in force.

        Args:
            key: the next step's key; None if the step's program is unknown or does not last.
        """
        if key == self._key or self.technique.off_because:
            return
        was_begun = self._begun
        self._key, self._steps, self._begun = key, 0, False
        self.technique.whole_steps = 0
        known = self._parts.get(key) if key is not None else None
        if known is not None:
            self._parts.move_to_end(key)
            self._install(known)
        elif was_begun:
            self.technique.withdraw()
            self.part = None

    def end_step(self, key: Hashable, trace: Trace | None) -> None:
        """Let the technique propose, once the program has lasted long enough.

        Args:
            key: the next step's key.
            trace: the trace of the step that ended; None if it was not recorded.
        """
        if key == self._key:
            self.technique.whole_steps += 1
        else:
            trace = None  # the trace belongs to the former key
        self.enter(key)
        self._steps += 1
        if self.technique.off_because or key is None or self._steps <= self._warmup_steps and not self._begun:
            return
        self._begun = True
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
        self._parts[key] = part
        while len(self._parts) > MOST_PARTS:
            self._parts.popitem(last=False)
        self._install(part)

    def close(self, why: str) -> None:
        """Withdraw the part in force, and propose nothing more.

        Args:
            why: the reason, for the report.
        """
        self.technique.off_because = why
        self.technique.withdraw()
        self.part = None
        self._parts.clear()

    def key_after(self, key: Hashable) -> Hashable:
        """Return the next technique's key, made from this technique's `key`; None while this one has no part."""
        if self.technique.off_because:
            return key
        return _After(key, self.part) if self.part is not None else None

    def _install(self, part: Any) -> None:
        try:
            self.technique.install(part)
        except MemplugError as error:
            self._fail(error)
        else:
            self.part, self._begun = part, True

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

    def enter(self, key: Hashable) -> None:
        """Switch all techniques to the program of the step that begins.

        Args:
            key: the lasting program with its decisions; None if no program lasts.
        """
        for follower in self._all:
            follower.enter(key)
            key = follower.key_after(key)

    def end_step(self, key: Hashable, trace: Trace | None) -> None:
        """Let each technique propose for the lasting program.

        Args:
            key: the lasting program with its decisions; None if no program lasts yet.
            trace: the trace of the step that ended; None if it was not recorded.
        """
        for follower in self._all:
            follower.end_step(key, trace)
            key = follower.key_after(key)

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
