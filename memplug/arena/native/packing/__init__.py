"""Placing buffers, in C++: greedy placement in a given order, and the search for offsets below a height.

Plain C++ behind a C interface, compiled on first use (some seconds) and kept in the user's cache folder, or where
`TORCH_EXTENSIONS_DIR` says; imports no torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import secrets
import shlex
import subprocess
from pathlib import Path

import numpy as np

from memplug.errors import NativeError

FOLDER = Path(__file__).parent
UNLIMITED_BYTES = 2**62
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")


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
    arrays = map(_pointer, (lower, upper, size, alignment, order))
    end = int(upper.max(initial=1))
    height = load().memplug_place(len(size), end, *arrays, int(tightest), limit_bytes, _pointer(offsets))
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
        *map(_pointer, (lower, upper, size, alignment)),
        height_bytes,
        ctypes.c_double(seconds),
        threads,
        _pointer(offsets),
    )
    return {1: True, 0: False, -1: None}[verdict], offsets


@functools.cache
def load() -> ctypes.CDLL:
    """The compiled library; compiled first where that was not done yet.

    Raises:
        NativeError: There is no compiler, or no folder to write to, or what it made cannot be loaded.
    """
    library = _library()
    try:
        if not library.exists():
            _compile(library)
        loaded = ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        text = f"the address search cannot be compiled into {library}: {output.strip()[-400:]}"
        raise NativeError(text, code="MP005") from error
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    loaded.memplug_place.argtypes = [number, number, *[pointer] * 5, number, wide, pointer]
    loaded.memplug_place.restype = wide
    loaded.memplug_decide.argtypes = [number, number, *[pointer] * 4, wide, ctypes.c_double, number, pointer]
    loaded.memplug_decide.restype = number
    return loaded


def _library() -> Path:
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    key = hashlib.sha256(" ".join((platform.machine(), *_command(), *_FLAGS)).encode())
    for source in _sources():
        key.update(source.read_bytes())
    return Path(root) / f"memplug_packing_{key.hexdigest()[:16]}" / "memplug_packing.so"


def _compile(library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    # Processes that start at once may each compile it: under a name of their own, the last one stays.
    partial = library.parent / f".{secrets.token_hex(8)}.partial"
    try:
        command = [*_command(), *_FLAGS, *map(str, _sources()), "-o", str(partial)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(partial, library)
    finally:
        partial.unlink(missing_ok=True)


def _command() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


def _sources() -> list[Path]:
    return sorted(FOLDER.glob("*.cpp"))


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)
