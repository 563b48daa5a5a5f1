"""Placing buffers, in C++: greedy placement in a given order, and the search for offsets below a height.
Imports no torch.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np

from memplug.native.plain import PlainLibrary, pointer
from memplug.sizes import UNLIMITED_BYTES

FOLDER = Path(__file__).parent


def place(
    instants: tuple[np.ndarray, np.ndarray],
    size: np.ndarray,
    alignment: np.ndarray,
    order: np.ndarray,
    *,
    tightest: bool = False,
    limit_bytes: int = UNLIMITED_BYTES,
) -> np.ndarray | None:
    """Offsets of buffers that are placed one by one in the order of `order`, each in a gap among those before.

    Args:
        instants: lower and upper of each buffer, int32[n], numbered densely from 0.
        size, alignment: int64[n], bytes.
        order: int32[n], rows.
        tightest: in the smallest gap, not in the lowest.
        limit_bytes: give up once the height is that or more.

    Returns:
        int64[n], bytes; None: given up.

    Raises:
        NativeError: see `load`.
    """
    lower, upper = (np.ascontiguousarray(array, np.int32) for array in instants)
    size, alignment = (np.ascontiguousarray(array, np.int64) for array in (size, alignment))
    order, offsets = np.ascontiguousarray(order, np.int32), np.zeros(len(size), np.int64)
    arrays = map(pointer, (lower, upper, size, alignment, order))
    end = int(upper.max(initial=1))
    height = load().memplug_place(len(size), end, *arrays, int(tightest), limit_bytes, pointer(offsets))
    return offsets if height < limit_bytes else None


def decide(
    sections: tuple[np.ndarray, np.ndarray],
    size: np.ndarray,
    alignment: np.ndarray,
    height_bytes: int,
    *,
    seconds: float,
    threads: int,
) -> tuple[bool | None, np.ndarray]:
    """Whether buffers fit below a height.

    Args:
        sections: first and end of each buffer's sections, int32[n], numbered densely from 0.
        size, alignment: int64[n], bytes.
        height_bytes: of the arena.
        seconds: time limit.
        threads: of the search; with one, the same answer in every run that is not cut off by the time limit.

    Returns:
        True and int64[n] offsets; or False: they do not fit, or None: out of time, and offsets that mean nothing.

    Raises:
        NativeError: see `load`.
    """
    lower, upper = (np.ascontiguousarray(array, np.int32) for array in sections)
    size, alignment = (np.ascontiguousarray(array, np.int64) for array in (size, alignment))
    offsets = np.zeros(len(size), np.int64)
    verdict = load().memplug_decide(
        len(size),
        int(upper.max(initial=0)),
        *map(pointer, (lower, upper, size, alignment)),
        height_bytes,
        ctypes.c_double(seconds),
        threads,
        pointer(offsets),
    )
    return {1: True, 0: False, -1: None}[verdict], offsets


@functools.cache
def load() -> ctypes.CDLL:
    """Returns the library.

    Raises:
        NativeError: see `PlainLibrary.load`.
    """
    loaded = PlainLibrary("memplug_packing", "address search", tuple(sorted(FOLDER.glob("*.cpp")))).load()
    address, number, wide = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    loaded.memplug_place.argtypes = [number, number, *[address] * 5, number, wide, address]
    loaded.memplug_place.restype = wide
    loaded.memplug_decide.argtypes = [number, number, *[address] * 4, wide, ctypes.c_double, number, address]
    loaded.memplug_decide.restype = number
    return loaded
