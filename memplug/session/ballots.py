"""Shared decisions of several ranks: a numbered log of ballots in torch's own store, which all ranks read.

rank: its value ──► store ──the last rank to vote combines the values──► verdict, which all ranks read

The store's compare-and-set keeps the first verdict that is written for a ballot, so each ballot has one verdict. A rank
that leaves writes the verdict "the log ends here"; so does a rank that has waited too long for another one. Therefore
ranks never act on different verdicts, and no rank enters a collective that another rank may miss. A thread beside
training sends and reads all ballots.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import pickle
import queue
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from memplug.errors import RanksError, coded

log = logging.getLogger("memplug")

PATIENCE_S = 30.0  # a rank warns when it has waited this long for the others
ANSWER_S = 10.0  # longest time that the store may take to answer
SHORTEST_POLL_S = 0.0002
LONGEST_POLL_S = 0.005
LONGEST_POLL_S_PER_RANK = 20e-6  # added to the longest poll interval for each rank: all poll one store
MEETING_POLL_S = 0.05
KEPT_BALLOTS = 64  # the store keeps this many of the latest ballots; no rank lags further behind

Store = dist.Store
_DECIDED, _ENDED = b"+", b"-"


@dataclass(eq=False, slots=True)
class _OpenBallot:
    number: int
    value: Any
    combine: Callable[[list[Any]], Any]
    decided: Future[Any] = field(default_factory=Future)
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class Voters:
    """Ranks that have found each other through the store (`meet`).

    Attributes:
        store: the section of torch's store that these ranks alone use.
        members: their ranks in the world.
        own: index of this rank in `members`.
    """

    store: Store
    members: Sequence[int]
    own: int

    def missing(self, place: object) -> list[int]:
        """Return the ranks that have stored no value under the key `place`."""
        return [rank for index, rank in enumerate(self.members) if not self.store.check([f"{place}/{index}"])]

    def leave(self, place: object, value: bytes | str = "") -> bool:
        """Store this rank's value under the key `place`; return whether all other ranks have already done so."""
        self.store.set(f"{place}/{self.own}", value)
        return self.store.add(f"{place}/count", 1) == len(self.members)

    def is_first_to_say(self, place: object) -> bool:
        """Return True to the first rank that calls this for the key `place`: that rank logs, the others do not."""
        return self.store.add(f"{place}/said", 1) == 1


class Ballots:
    """The ballots of ranks that have met. All ranks cast the same ballots in the same order.

    Attributes:
        ended: why there are no more ballots; "" while there are.
        torn: True if other ranks may have a verdict that this one can no longer read, since the store is gone.
    """

    def __init__(self, voters: Voters):
        self._sending = _Sending(voters)
        self._number = 0
        thread = threading.Thread(target=self._sending.run, name="memplug ballots", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _close, self._sending.queue, thread)
        """Ends the ballots: this rank casts no more, and the other ranks' next ballot gets no verdict."""

    @property
    def ended(self) -> str:
        """Return why there are no more ballots; "" while there are."""
        return self._sending.ended

    @property
    def torn(self) -> bool:
        """Return whether other ranks may have a verdict that this one can no longer read."""
        return self._sending.torn

    def part(self) -> None:
        """Stop casting ballots until `rejoin`; if other ranks cast one meanwhile, all ballots end."""
        self._sending.queue.put(functools.partial(self._sending.part, True))

    def rejoin(self) -> None:
        """Cast ballots again, after `part`."""
        self._sending.queue.put(functools.partial(self._sending.part, False))

    def cast(self, value: Any, combine: Callable[[list[Any]], Any], limit_s: float) -> Callable[[], Any]:
        """Cast a ballot; return a function that waits for its verdict, for at most `limit_s`.

        The returned function raises `RanksError` if the ballots have ended.

        Args:
            value: this rank's value, of any type that can be pickled.
            combine: makes the verdict from all values, in the order of ranks; the same function on all ranks.
            limit_s: seconds after which the ballots of all ranks end if one rank has not voted.
        """
        self._number += 1
        ballot = _OpenBallot(self._number, value, combine)
        self._sending.queue.put(ballot)
        return lambda: self._wait(ballot, limit_s)

    def is_first_to_say(self) -> bool:
        """Return True to the first rank that calls this, which then reports why the ballots have ended."""
        return self._sending.is_first_to_say()

    def _wait(self, ballot: _OpenBallot, limit_s: float) -> Any:
        quiet_s = min(PATIENCE_S, limit_s)
        with contextlib.suppress(NotYet):
            return ballot.decided.result(quiet_s)
        if quiet_s < limit_s:
            self._sending.queue.put(lambda: self._sending.tell_missing(ballot, limit_s))
            with contextlib.suppress(NotYet):
                return ballot.decided.result(limit_s - quiet_s)
        ballot.is_given_up = True
        try:
            return ballot.decided.result(ANSWER_S)
        except NotYet:
            self._sending.torn = True
            raise RanksError("torch's store does not answer any more", code="MP010") from None


def _close(asked: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    asked.put(None)
    thread.join(ANSWER_S)


class _Sending:
    """The work of the thread that sends ballots; holds no reference to the session, which can thus be collected."""

    def __init__(self, voters: Voters):
        self.queue: queue.SimpleQueue[_OpenBallot | Callable[[], None] | None] = queue.SimpleQueue()
        self.ended = ""
        self.torn = self._has_parted = False
        self._voters, self._store = voters, voters.store
        self._open: deque[_OpenBallot] = deque()
        self._next = 1  # number of the ballot that this rank casts next
        self._longest_poll_s = LONGEST_POLL_S + LONGEST_POLL_S_PER_RANK * len(voters.members)

    def run(self) -> None:
        """Send and read ballots until `Ballots.close`, or until the process ends."""
        poll_s = SHORTEST_POLL_S
        while True:
            try:
                asked = self.queue.get(timeout=poll_s if self._open or self._has_parted else None)
            except queue.Empty:
                poll_s = min(2 * poll_s, self._longest_poll_s)
            else:
                poll_s = SHORTEST_POLL_S
                if asked is None:
                    break
                self._do(asked)
            with self._lost():
                self._read()
                if self._has_parted:
                    self._look_for_others()
        with contextlib.suppress(RuntimeError):  # the store's process has ended
            self._end(self._next, f"rank {self._voters.members[self._voters.own]} takes no more steps with the others")
        self._finish("the session is detached")

    def tell_missing(self, ballot: _OpenBallot, limit_s: float) -> None:
        """Warn which ranks have not voted; of the ranks that wait, only one warns.

        Args:
            ballot: the ballot that waits.
            limit_s: seconds after which the wait ends.
        """
        missing = self._voters.missing(ballot.number)
        if missing and self._voters.is_first_to_say(ballot.number):
            text = (
                "memplug: at the end of a step, ranks wait for %s: %.0f s so far, and %.0f s more at most; then they "
                "stop planning, and training continues. Give all ranks the same number of batches"
            )
            log.warning(coded("MP010", text), named(missing), PATIENCE_S, limit_s - PATIENCE_S)

    def part(self, has_parted: bool) -> None:
        """Note that this rank has parted or rejoined; see `Ballots.part`."""
        self._has_parted = has_parted and not self.ended

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the store's process has ended
            self.torn = self.torn or bool(self._open)
            self._finish(f"torch's store is gone: {str(error).partition(chr(10))[0]}")

    def _do(self, asked: _OpenBallot | Callable[[], None]) -> None:
        if isinstance(asked, _OpenBallot):
            self._open.append(asked)
            self._next = asked.number + 1
        with self._lost():
            if self.ended:
                self._finish(self.ended)
            elif isinstance(asked, _OpenBallot):
                self._cast(asked)
            else:
                asked()

    def _cast(self, ballot: _OpenBallot) -> None:
        if self._voters.leave(ballot.number, pickle.dumps(ballot.value)):
            self._decide(ballot)
        old = ballot.number - KEPT_BALLOTS
        if old > 0:
            self._store.delete_key(f"{old}/{self._voters.own}")
            if self._voters.own == 0:
                self._store.delete_key(f"{old}/count")
                self._store.delete_key(f"{old}/verdict")

    def _decide(self, ballot: _OpenBallot) -> None:
        number = ballot.number
        values = self._store.multi_get([f"{number}/{index}" for index in range(len(self._voters.members))])
        verdict = ballot.combine([pickle.loads(value) for value in values])
        self._store.compare_set(f"{number}/verdict", "", _DECIDED + zlib.compress(pickle.dumps(verdict), 1))

    def _read(self) -> None:
        while self._open:
            ballot = self._open[0]
            place = f"{ballot.number}/verdict"
            if ballot.is_given_up and not self._store.check([place]):
                if late := self._voters.missing(ballot.number):
                    self._end(ballot.number, f"{named(late)} did not end the step that others had ended")
                else:  # all ranks have voted, but the last one died before it wrote the verdict
                    self._decide(ballot)
            if not self._store.check([place]):
                return
            verdict = self._store.get(place)
            if verdict[:1] == _ENDED:
                self._finish(verdict[1:].decode())
                return
            self._open.popleft()
            ballot.decided.set_result(pickle.loads(zlib.decompress(verdict[1:])))

    def _look_for_others(self) -> None:
        if self._store.check([f"{self._next}/count"]):
            own = named([self._voters.members[self._voters.own]])
            why = f"{own} has no more batches, and waits for the others in torch's `join`"
            self._end(self._next, why)
            self._finish(why)

    def _end(self, number: int, why: str) -> None:
        self._store.compare_set(f"{number}/verdict", "", _ENDED + why.encode())

    def _finish(self, why: str) -> None:
        self.ended, self._has_parted = why, False
        while self._open:
            self._open.popleft().decided.set_exception(RanksError(why))

    def is_first_to_say(self) -> bool:
        """Return True to the first rank that calls this, or to every rank if the store is gone."""
        with contextlib.suppress(RuntimeError):
            return self._voters.is_first_to_say("end")
        return True


def meet(store: Store, members: Sequence[int], rank: int, timeout_s: float) -> Voters:
    """Wait until every rank of `members` has called this function as often as this rank.

    Args:
        store: torch's own store. Ballots use a clone of its connection, since other threads may hold this one.
        members: ranks of the world, in the same order on all of them.
        rank: rank of this process in the world.
        timeout_s: seconds after which this rank gives up; then all others give up too.

    Returns:
        The ranks that have met.

    Raises:
        RanksError: this rank gave up, or another one did.
    """
    store = store.clone() if hasattr(store, "clone") else store
    store = dist.PrefixStore(f"memplug/{hashlib.sha256(repr(list(members)).encode()).hexdigest()[:16]}", store)
    times = store.add(f"times/{rank}", 1)
    voters = Voters(dist.PrefixStore(str(times), store), members, members.index(rank))
    if voters.leave("here"):
        voters.store.compare_set("met", "", _DECIDED)
    began, is_told = time.monotonic(), False
    while not voters.store.check(["met"]):
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            missing = named(voters.missing("here"))
            voters.store.compare_set("met", "", _ENDED + f"{missing} did not attach in {timeout_s:.0f} s".encode())
        elif waited_s > PATIENCE_S and not is_told:
            is_told = True
            _tell_absent(voters)
        else:
            time.sleep(min(MEETING_POLL_S, SHORTEST_POLL_S + waited_s / 8))
    met = voters.store.get("met")
    if met != _DECIDED:
        raise RanksError(f"the ranks that train this model did not meet: {met[1:].decode()}", code="MP004")
    return voters


def _tell_absent(voters: Voters) -> None:
    missing = voters.missing("here")
    if missing and voters.is_first_to_say("here"):
        text = (
            "memplug: rank %d waits in `memplug.attach` for %s, since the ranks that train a model attach to it "
            "together. If those do not train it, say which do: memplug.attach(model, config, group=...)"
        )
        log.warning(coded("MP004", text), voters.members[voters.own], named(missing))


def named(ranks: Sequence[int]) -> str:
    """Return ranks in words, for example "rank 3" or "ranks 0, 1 and 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *most, last = ranks or ["?"]
    return f"ranks {', '.join(map(str, most))} and {last}" if most else "no rank"
