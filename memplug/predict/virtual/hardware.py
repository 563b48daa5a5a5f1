"""The profile of a GPU: rates by which the virtual device predicts durations, read from a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from memplug.errors import HardwareError
from memplug.files import path_of

SOURCES = ("measured", "fitted", "published", "scaled", "assumed")
LINK_RATES = tuple(f"{to}{both}_bytes_per_s" for both in ("", "_both") for to in ("to_host", "to_device"))
"""Entries of a profile that are one `Rate` each, by the bytes of a copy."""
RATES = ("matmul_flops", "attention_forward_flops", "attention_backward_flops")
"""Entries of a profile that are several `Rate`s each, one for each dtype or attention back end."""
PROFILES = Path(__file__).with_name("profiles")
"""Folder of the profiles that memplug ships; in the repository, a link to configs/hardware."""


@dataclass(frozen=True)
class Rate:
    """A rate per second that depends on a size.

    Attributes:
        points: Pairs of size and rate, with sizes of at least 1 in rising order. Between points the rate is linear in
            the size's logarithm; below the first and above the last point it is constant.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def always(cls, rate: float) -> Rate:
        """Return a rate that is the same for all sizes.

        Args:
            rate: The rate.
        """
        return cls(((1.0, rate),))

    def at(self, size: float) -> float:
        """Return the rate at a size.

        Args:
            size: The size.
        """
        sizes, rates = zip(*self.points, strict=True)
        return float(np.interp(math.log(max(size, 1.0)), np.log(sizes), rates))


@dataclass(frozen=True)
class GpuProfile:
    """The rates and sizes of one kind of GPU, of its host and of the link between them.

    Attributes:
        name: The GPU's name as torch reports it, so that a real GPU of this kind accepts a plan made for the profile.
        memory_bytes: Device memory that a process can use.
        peak_flops: Peak rate of matrix products in bfloat16, in floating-point operations per second: the vendor's, or
            the highest measured. Model FLOP/s utilization is relative to this rate.
        matmul_flops: Rates of matrix products, in floating-point operations per second, by dtype such as "bfloat16". A
            rate's sizes are the floating-point operations of a product.
        attention_forward_flops: Rates of attention's forward, in floating-point operations per second, by back end such
            as "flash"; the first back end is the default. A rate's sizes are the keys in a sequence. For each query,
            key and output channel, causal attention counts 2 operations, other attention 4.
        attention_backward_flops: Rates of attention's backward, by the same sizes; causal attention counts 5
            operations, other attention 10.
        memory_bytes_per_s: Bandwidth of device memory, which bounds operators that compute little.
        kernel_s: The shortest time that a kernel takes, in seconds.
        to_host_bytes_per_s: Rate of copies from device to pinned host memory while the other direction is idle. The
            sizes of this rate and of the next three are the bytes of a copy.
        to_device_bytes_per_s: Rate of copies from pinned host memory to device while the other direction is idle.
        to_host_both_bytes_per_s: Rate of copies from device to pinned host memory while both directions are busy.
        to_device_both_bytes_per_s: Rate of copies from pinned host memory to device while both directions are busy.
        copy_s: Fixed time of a copy, in seconds.
        launch_s: Host time to launch one operator, in seconds.
        observe_s: Host time of memplug's own work for each operator of a region, in seconds
            (memplug/device/host_time.py).
        region_s: Host time of memplug's own work for a region's forward, in seconds.
        restore_s: Host time of memplug's own work for a region's backward with a recompute pass, in seconds.
        collective_bytes_per_s: Bandwidth to the other GPUs of the machine in each direction; the bus bandwidth that
            nccl-tests reports.
        collective_s: Fixed time of a collective, in seconds.
    """

    name: str
    memory_bytes: float
    peak_flops: float
    matmul_flops: Mapping[str, Rate]
    attention_forward_flops: Mapping[str, Rate]
    attention_backward_flops: Mapping[str, Rate]
    memory_bytes_per_s: float
    kernel_s: float
    to_host_bytes_per_s: Rate
    to_device_bytes_per_s: Rate
    to_host_both_bytes_per_s: Rate
    to_device_both_bytes_per_s: Rate
    copy_s: float
    launch_s: float
    observe_s: float
    region_s: float
    restore_s: float
    collective_bytes_per_s: float
    collective_s: float

    @classmethod
    def named(cls, name: str | Path, folder: Path = PROFILES) -> GpuProfile:
        """Read a GPU's profile by its name, such as "h200" (in upper or lower case), or by a file's path.

        Args:
            name: The name or the path.
            folder: The folder with the named profiles.

        Raises:
            HardwareError: Neither a profile in the folder nor a file has that name (the error lists the folder's
                profiles), or the file is not a profile.
        """
        known = {file.stem: file for file in sorted(folder.glob("*.json"))}
        file = known.get(str(name).lower()) or path_of(name, "hardware profile (.json)", HardwareError)
        if not file.is_file():
            raise HardwareError(
                f"no GPU {name!r}: there are {', '.join(known)}",
                "Name one of those, or the path of a profile: `memplug doctor --measure FILE` measures this machine's "
                "GPU and writes one.",
            )
        return cls.read(file)

    @classmethod
    def read(cls, file: Path) -> GpuProfile:
        """Read a profile from a JSON file.

        The file is an object with the attributes of this class. `name` is a string. Each attribute in `RATES` is an
        object with one entry for each dtype or attention back end. Any other attribute is one entry. An entry is
        `{"value": ..., "from": ...}`. The value of a `Rate` is a number or `[[size, rate], ...]`. "from" is one of:

        * "measured".
        * "fitted": to measured steps.
        * "published".
        * "scaled": the published value, times (fitted / published) of other hardware.
        * "assumed".

        Args:
            file: The JSON file.

        Raises:
            HardwareError: The file cannot be read or is not a profile.
        """
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise HardwareError(f"{file}: {error}") from error
        names = [field.name for field in fields(cls)]
        if not isinstance(found, Mapping) or set(found) != set(names):
            raise HardwareError(f"{file}: a hardware profile has {', '.join(names)}")
        values: dict[str, Any] = {"name": str(found["name"])}
        for name in names[1:]:
            entry, where = found[name], f"{file}: {name}"
            if name in LINK_RATES:
                values[name] = _rate(_value(entry, where), where)
            elif name not in RATES:
                values[name] = _number(_value(entry, where), where)
            elif isinstance(entry, Mapping) and entry:
                values[name] = {each: _rate(_value(entry[each], where), where) for each in entry}
            else:
                raise HardwareError(f"{where} must have one or more rates by name")
        if set(values["attention_forward_flops"]) != set(values["attention_backward_flops"]):
            raise HardwareError(f"{file}: attention has other back ends in forward than in backward")
        return cls(**values)

    def attention(self, backend: str | None) -> str:
        """Check the name of an attention back end, and return it.

        Args:
            backend: The name; None: that of the profile's first back end.

        Raises:
            HardwareError: The profile has no such back end.
        """
        known = tuple(self.attention_forward_flops)
        if backend is not None and backend not in known:
            raise HardwareError(
                f"{self.name} has no attention back end {backend!r}: it has {', '.join(known)}", "Name one of those."
            )
        return backend or known[0]


def _value(entry: Any, where: str) -> Any:
    if not isinstance(entry, Mapping) or set(entry) != {"value", "from"}:
        raise HardwareError(f'{where} must be {{"value": ..., "from": ...}}')
    if entry["from"] not in SOURCES:
        raise HardwareError(f"{where} must say where it is from: {', '.join(SOURCES)}")
    return entry["value"]


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise HardwareError(f"{where} must have a value above 0")
    return float(value)


def _rate(value: Any, where: str) -> Rate:
    if not isinstance(value, list):
        return Rate.always(_number(value, where))
    points = tuple(tuple(_number(each, where) for each in point) for point in value if isinstance(point, list))
    sizes = [point[0] for point in points if len(point) == 2]
    if not sizes or len(sizes) < len(value) or any(b <= a for a, b in zip(sizes, sizes[1:], strict=False)):
        raise HardwareError(f"{where} must have a number, or [[size, rate], ...] with sizes rising")
    return Rate(points)
