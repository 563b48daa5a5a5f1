"""Bindings of the C++ that places buffers: in a given order, by a search for offsets below a height, or as they come.

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
    """Place buffers one by one in a given order, each in a gap among the buffers before it.

    Args:
        instants: first instant of each buffer's lifetime, and the instant at which it ends; int32[n] each. Instants
            are numbered densely from 0.
        size: of each buffer, bytes, int64[n].
        alignment: of each buffer's offset, bytes, int64[n].
        order: indices of the buffers in the order of placement, int32[n].
        tightest: choose the smallest gap that fits, not the lowest.
        limit_bytes: give up once the height reaches this.

    Returns:
        The buffers' offsets, bytes, int64[n]; None if the height reached `limit_bytes`.

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
    """Decide whether buffers fit below a height.

    Args:
        sections: first section of each buffer's lifetime, and the section before which it ends; int32[n] each.
            Sections, which divide time, are numbered densely from 0.
        size: of each buffer, bytes, int64[n].
        alignment: of each buffer's offset, bytes, int64[n].
        height_bytes: the buffers fit if all of them end at or below this offset.
        seconds: time limit.
        threads: threads of the search; with one, all runs that end in time give the same answer.

    Returns:
        The verdict (True: the buffers fit; False: they do not; None: out of time), and the buffers' offsets, bytes,
        int64[n]. The offsets are valid only if the verdict is True.

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


def serve(request: np.ndarray, size: np.ndarray, hangs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Serve requests as they come, each at the lowest free bytes of its end of a room that has no limit.

    Args:
        request: the request that each event concerns, int32[events]: its malloc, then its free.
        size: of each request, bytes above 0, int64[n].
        hangs: whether a request takes its bytes at the room's top and not at its bottom, bool[n].

    Returns:
        The offset of each request, counted from its end of the room, int64[n]; and the bytes that the room needs after
        each event, int64[events].

    Raises:
        NativeError: see `load`.
    """
    request, size = np.ascontiguousarray(request, np.int32), np.ascontiguousarray(size, np.int64)
    hangs, begin = np.ascontiguousarray(hangs, np.uint8), np.empty(len(size), np.int64)
    height = np.empty(len(request), np.int64)
    arrays = map(pointer, (request, size, hangs, begin, height))
    load().memplug_serve(len(request), len(size), *arrays)
    return begin, height


@functools.cache
def load() -> ctypes.CDLL:
    """Compile the library where needed, and return it.

    Raises:
        NativeError: see `PlainLibrary.load`.
    """
    loaded = PlainLibrary("memplug_packing", "address search", tuple(sorted(FOLDER.glob("*.cpp")))).load()
    address, number, wide = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    loaded.memplug_place.argtypes = [number, number, *[address] * 5, number, wide, address]
    loaded.memplug_place.restype = wide
    loaded.memplug_decide.argtypes = [number, number, *[address] * 4, wide, ctypes.c_double, number, address]
    loaded.memplug_decide.restype = number
    loaded.memplug_serve.argtypes = [number, number, *[address] * 5]
    loaded.memplug_serve.restype = None
    return loaded
