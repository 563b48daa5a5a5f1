"""Rules that the planner shares with the native core (native/tape/rules.h).

They determine which operators a recompute pass runs, and how many rows to capture for a fraction.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from memplug.native.plain import PlainLibrary, pointer

_NATIVE = Path(__file__).parent.parent / "native"
_SKIP = 2  # `Action::SKIP` in rules.h; RUN is 0


class Passes:
    """Finds the operators that a region's recompute pass runs.

    Args:
        inputs: for each operator in program order, the storages that it reads.
        outputs: for each operator, the storages that it makes or writes to.
        always_runs: for each operator, whether every pass runs it.
        given: storages that no operator has to make.
    """

    def __init__(
        self,
        inputs: Sequence[Iterable[int]],
        outputs: Sequence[Iterable[int]],
        always_runs: Sequence[bool],
        given: Collection[int],
    ):
        self._numbers: dict[int, int] = {}
        self._read_ends, self._read = self._flat(inputs)
        self._changed_ends, self._changed = self._flat([set(each).difference(given) for each in outputs])
        self._always = np.array(always_runs, np.uint8)

    def asked(self, saved: Iterable[int], available: Iterable[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Return two sets: the operators that a pass runs, and those with an output that backward or the pass asks for.

        Args:
            saved: storages that backward asks for.
            available: operators whose outputs are kept or swapped whole.
        """
        captured = np.zeros(len(self._always), np.uint8)
        captured[list(available)] = True
        actions = self._actions(len(captured), saved, self._always, captured)
        return frozenset(np.flatnonzero(actions == 0).tolist()), frozenset(np.flatnonzero(actions != _SKIP).tolist())

    def makers(self, storages: Iterable[int], before: int | None = None) -> list[int]:
        """Return the operators that make or write to storages.

        Args:
            storages: ids of the storages.
            before: index of the first operator that does not count; None: all count.
        """
        count = len(self._always) if before is None else before
        actions = self._actions(count, storages, np.zeros(count, np.uint8), np.ones(count, np.uint8))
        return np.flatnonzero(actions != _SKIP).tolist()

    def _actions(self, count: int, saved: Iterable[int], always: np.ndarray, captured: np.ndarray) -> np.ndarray:
        wanted = self._known(saved)
        actions = np.empty(count, np.uint8)
        arrays = map(pointer, (self._read_ends, self._read, self._changed_ends, self._changed, always, captured))
        load().memplug_actions(count, *arrays, len(self._numbers), pointer(wanted), len(wanted), pointer(actions))
        return actions

    def _flat(self, storages: Sequence[Iterable[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays: the index where each operator's storages end, and all storages, numbered without gaps."""
        numbers = [[self._numbers.setdefault(each, len(self._numbers)) for each in some] for some in storages]
        return np.array([*accumulate(map(len, numbers))], np.int32), np.array([*sum(numbers, [])], np.int32)

    def _known(self, storages: Iterable[int]) -> np.ndarray:
        return np.array([self._numbers[each] for each in storages if each in self._numbers], np.int32)


def rows_taken(fraction: float, rows: int) -> int:
    """Return how many of `rows` rows are captured if `fraction` of them is to be swapped."""
    return load().memplug_rows_taken(fraction, rows)


@functools.cache
def load() -> ctypes.CDLL:
    """Return the C library of the rules, built on first use.

    Raises:
        NativeError: see `PlainLibrary.load`.
    """
    sources, headers = (_NATIVE / "rules" / "rules.cpp",), (_NATIVE / "tape" / "rules.h",)
    loaded = PlainLibrary("memplug_rules", "planner's rules", sources, headers).load()
    address, number = ctypes.c_void_p, ctypes.c_int32
    loaded.memplug_actions.argtypes = [number, *[address] * 6, number, address, number, address]
    loaded.memplug_actions.restype = None
    loaded.memplug_rows_taken.argtypes = [ctypes.c_double, ctypes.c_int64]
    loaded.memplug_rows_taken.restype = ctypes.c_int64
    return loaded
