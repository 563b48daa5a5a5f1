"""The recorder and the arena, of which a process has one each: which session gets them, and when.

A session claims both when its model first runs forward with gradients, so that a model that never trains (a reference,
a teacher) takes them from no other. Where another session has them, it claims again at each step, and gets them once
that one is detached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from memplug import native
from memplug.arena.manager import Serving
from memplug.errors import MemplugError, RecorderError
from memplug.session.recording import Recording

log = logging.getLogger("memplug")

NOT_ASKED_FOR = "the block switches it off"
TAKEN = "another model that trains in this process has it"


class Claim:
    """One session's hold on the recorder and the arena.

    Args:
        make_recording: gives the session's recording, and with it the recorder.
        make_serving: gives what decides when the arena serves, with the arena; None: the block switches it off.
        watches: whether operators are to be compared.
        wanted: whether anything asks for the recorder.

    Attributes:
        recording: None without the recorder.
        serving: None without the arena.
        profiler_off_because: operators are not compared; "" while they are, or before anything was claimed.
        arena_off_because: likewise, of the arena.
    """

    def __init__(
        self,
        make_recording: Callable[[], Recording],
        make_serving: Callable[[], Serving] | None,
        *,
        watches: bool,
        wanted: bool,
    ):
        self.recording: Recording | None = None
        self.serving: Serving | None = None
        self._make_recording, self._make_serving = make_recording, make_serving
        self._watches, self._pending = watches, wanted
        self._told = False
        self._explain("")
        if wanted:
            self._build()

    @property
    def has_arena(self) -> bool:
        """Whether the arena serves, or may yet."""
        return not (self.serving.why if self.serving is not None else self.arena_off_because)

    def take(self) -> bool:
        """Claim what is wanted and not claimed yet; returns whether the recorder was got by this call."""
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
        """Claim the recorder, whatever the block says, and the arena where the block does.

        Raises:
            NativeError: the native core cannot be built here.
            RecorderError: another session of this process has the recorder.
        """
        self.recording = self._make_recording()
        pending, self._pending = self._pending, False
        self._explain("")
        if self._make_serving is None or not pending:
            return
        try:
            self.serving = self._make_serving()
        except MemplugError as error:
            self.arena_off_because = error.problem
            log.warning("memplug: goes on without the arena: %s", error)

    def release(self, why: str) -> None:
        """The session is detached."""
        self._pending = False
        if self.serving is not None:
            self.serving.close(why)
        if self.recording is not None:
            self.recording.stop()
        self._make_recording, self._make_serving = _detached, None  # they hold the model

    def _build(self) -> None:
        """Now, so that no step waits for the compiler, and a missing one is told of at the start."""
        try:
            native.load()
        except MemplugError as error:
            self._fail(error)

    def _fail(self, error: MemplugError) -> None:
        self._pending = False
        self._explain(error.problem)
        log.warning("memplug: goes on without the profiler and the arena: %s", error)

    def _miss(self) -> None:
        self._explain(TAKEN)
        if not self._told:
            self._told = True
            log.warning(
                "memplug: goes on without the profiler and the arena: another model that trains in this process has "
                "them, and there is one of each; a plan is made by the sizes of inputs alone"
            )

    def _explain(self, why: str) -> None:
        self.profiler_off_because = why if self._watches else NOT_ASKED_FOR
        self.arena_off_because = why if self._make_serving is not None else NOT_ASKED_FOR


def _detached() -> Recording:
    raise RecorderError("a session that is detached records nothing", "Attach again.")
