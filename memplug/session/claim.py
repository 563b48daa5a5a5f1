"""Claims the recorder and the arena, of which a process has one each, for one session.

A session claims both when its model first runs forward with gradients, so that a model that never trains (a reference,
a teacher) takes them from no other model. If another session has them, this session tries again at each step, until
that session is detached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from memplug.errors import MemplugError, RecorderError, coded
from memplug.session.followers import Followers
from memplug.session.given import Given
from memplug.session.recording import Recording
from memplug.session.technique import Technique

log = logging.getLogger("memplug")

NOT_ASKED_FOR = "the block switches it off"
TAKEN = "another model that trains in this process has it"


class Claim:
    """One session's claim on the recorder, and the techniques that need it.

    Args:
        make_recording: makes the session's recording, and with it the recorder.
        techniques: the techniques that the block asks for.
        given: what the session provides to them.
        unwatched_because: why steps are not compared by their operators; "" if they are.
        warmup_steps: number of steps that a program runs before a technique proposes for it.
        records: True if a step is to be recorded even if no technique asks for it.

    Attributes:
        recording: the session's recording; None without the recorder.
        followers: the techniques; empty until the recorder is claimed.
        off_because: why the session has no recorder; "" while it has one, or has not tried to claim it.
    """

    def __init__(
        self,
        make_recording: Callable[[], Recording],
        techniques: Sequence[type[Technique[Any]]],
        given: Given,
        *,
        unwatched_because: str,
        warmup_steps: int,
        records: bool,
    ):
        self.recording: Recording | None = None
        self.followers = Followers()
        self.off_because = ""
        self._make_recording, self._techniques, self._given = make_recording, techniques, given
        self._unwatched_because, self._warmup_steps = unwatched_because, warmup_steps
        self._failed: dict[str, str] = {}
        self._pending = not unwatched_because or records or bool(techniques)
        self._told = False

    @property
    def profiler_off_because(self) -> str:
        """Return why steps are not compared by operators; "" while they are, or before the first claim."""
        return self._unwatched_because or self.off_because

    def why_off(self, name: str) -> str:
        """Return why training goes on without the technique called `name`; "" while it may have a part in force."""
        technique = self.followers.find(name)
        if technique is not None:
            return technique.off_because
        wanted = any(each.name == name for each in self._techniques)
        return self._failed.get(name) or (self.off_because if wanted else NOT_ASKED_FOR)

    @property
    def parts(self) -> dict[str, Any] | None:
        """Return the parts in force, by technique; None while a technique has no part yet."""
        is_waiting = bool(self._techniques) and self.recording is None and not self.off_because
        return None if is_waiting else self.followers.parts

    def take(self) -> bool:
        """Claim the recorder if it is wanted and not claimed yet; return whether this call obtained it."""
        if not self._pending:
            return False
        try:
            self.demand()
        except RecorderError:
            self._miss()
            return False
        except MemplugError as error:
            self._fail(error)
            return False
        return True

    def demand(self) -> None:
        """Claim the recorder even if the block does not ask for it; make the techniques that the block asks for.

        Raises:
            RecorderError: another session of this process has the recorder.
        """
        self.recording = self._make_recording()
        pending, self._pending = self._pending, False
        self.off_because = ""
        if pending:
            self.followers = Followers((each, self._warmup_steps) for each in self._made())

    def release(self, why: str) -> None:
        """Close the techniques and release the recorder: the session is detached.

        Args:
            why: the reason, for the techniques' reports.
        """
        self._pending = False
        self.followers.close(why)
        if self.recording is not None:
            self.recording.stop()
        self._make_recording = _detached  # drops the function that references the model

    def _made(self) -> Iterator[Technique[Any]]:
        for technique in self._techniques:
            try:
                yield technique.make(self._given)
            except MemplugError as error:
                self._failed[technique.name] = error.problem
                log.warning("memplug: goes on without the %s: %s", technique.name, error)

    def _fail(self, error: MemplugError) -> None:
        self._pending = False
        self.off_because = error.problem
        log.warning("memplug: goes on without the profiler and the arena: %s", error)

    def _miss(self) -> None:
        self.off_because = TAKEN
        if not self._told:
            self._told = True
            text = (
                "memplug: goes on without the profiler and the arena: another model that trains in this process has "
                "them, and a process has one of each. Programs are told apart by the sizes of inputs alone. Detach the "
                "other session to use them here"
            )
            log.warning(coded("MP007", text))


def _detached() -> Recording:
    raise RecorderError("a session that is detached records nothing", "Attach again.")
