"""The order in which programs ran, and the program that the next step is likely to run.

All ranks keep the same order, since they add to it what their votes agree on. So they expect the same program.
"""

from __future__ import annotations

REMEMBERED_STEPS = 512
CONTEXTS = (64, 32, 16, 8, 4, 2)  # numbers of latest steps to look for earlier in the order, the most telling first
HORIZON_STEPS = 50  # a program that was last seen longer ago counts as one that does not repeat

_FORGOTTEN = 255


class Order:
    """The latest programs in the order of their steps, by index; an index is below 255."""

    def __init__(self) -> None:
        self._ran = bytearray()

    def add(self, index: int) -> None:
        """Add the program of a step."""
        self._ran.append(index)
        if len(self._ran) >= 2 * REMEMBERED_STEPS:
            del self._ran[:-REMEMBERED_STEPS]

    def forget(self, index: int) -> None:
        """Forget a program, since its index will stand for another one."""
        self._ran = self._ran.replace(bytes([index]), bytes([_FORGOTTEN]))

    def follows(self, ahead: int = 1) -> int | None:
        """Return the program that is likely to run `ahead` steps after the last one; None if there is no order yet.

        A context is a number of latest steps, among which the program changed. The expected program is the one that
        followed the longest context, if the context came twice before, and the same program followed both times.
        Without such a context, the last program is likely to run again, unless it never ran twice in a row: then the
        program before it is.

        Args:
            ahead: 1 for the next step, 2 for the step after it.
        """
        ran = self._ran
        if not ran:
            return None
        last = ran[-1]
        since_change = len(ran) - len(ran.rstrip(bytes([last])))
        if since_change == len(ran):
            return last
        for length in [each for each in CONTEXTS if each > since_change] + [since_change + 1]:
            context, seen, end = ran[-length:], [], len(ran) - ahead
            while len(context) == length and len(seen) < 2 and (at := ran.rfind(context, 0, end)) >= 0:
                seen.append(ran[at + length - 1 + ahead])
                end = at + length - 1
            if len(seen) == 2 and seen[0] == seen[1] != _FORGOTTEN:
                return seen[0]
        return last if bytes([last, last]) in ran or ran[-2] == _FORGOTTEN else ran[-2]

    def has_lately(self, index: int) -> bool:
        """Return whether a program ran within the last `HORIZON_STEPS` steps."""
        return index in self._ran[-HORIZON_STEPS:]

    @property
    def never_repeats(self) -> bool:
        """Return whether no program ran twice within the last `HORIZON_STEPS` steps."""
        latest = [index for index in self._ran[-HORIZON_STEPS:] if index != _FORGOTTEN]
        return len(self._ran) >= HORIZON_STEPS and len(set(latest)) == len(latest)
