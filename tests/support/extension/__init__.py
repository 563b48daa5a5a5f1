"""The tests' own C++ around parts of the native core, built on first use, as the core is.

It has streams that leave out a kind of wait, streams of a device that Python implements, a store of rows in a file, a
swap list that runs without tensors, and watchers of operators.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from memplug import native
from memplug.device.device import Device
from memplug.native.building import Extension
from tests.support.folders import ROOT

INCLUDED = ("native", "device/native", "profile/native", "swap/native")
EXTENSION = Extension(
    "memplug_tests",
    "tests' extension",
    (Path(__file__).parent,),
    tuple(ROOT / "memplug" / folder for folder in INCLUDED),
)

Wait = enum.Enum(
    "Wait",
    "OFFLOAD_FOR_COMPUTE RELEASE_FOR_OFFLOAD MUTATE_FOR_OFFLOAD PREFETCH_FOR_COMPUTE USE_FOR_PREFETCH "
    "DISCARD_FOR_PREFETCH USE_FOR_COMPUTE",
)
"""The reasons for which one stream waits for another; `memplug/device/native/streams.h` says what each orders."""


@functools.cache
def load() -> ModuleType:
    """Load the core, whose types the extension uses, then the extension; return the extension's module."""
    native.load()
    return EXTENSION.load()


def leaving_out(streams: Any, missing: Wait | None) -> Any:
    """Return the core's streams, changed to leave out one kind of wait, or none, and to count requests for waits."""
    extension = load()
    return extension.LeavingOut(streams, missing and getattr(extension.Wait, missing.name))


def python_streams(device: Any) -> Any:
    """Return streams of a device that Python implements (`tests.support.simulated.ScriptedDevice`)."""
    return load().PythonStreams(device)


def waits(streams: Any, why: Wait) -> int:
    """Return how often streams of `leaving_out` were asked for a kind of wait."""
    return streams.count(getattr(load().Wait, why.name))


def leaving_out_of(kind: type[Device], missing: Wait) -> Callable[[Device, Any], Any]:
    """Return a replacement for `kind.streams`, whose streams leave out one kind of wait."""
    streams = kind.streams
    return lambda device, core: leaving_out(streams(device, core), missing)
