"""What a GPU does in a second: the rates that `memplug.predict.virtual` counts with, and the files that have them."""

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
"""Entries that are one rate, by the bytes of a copy."""
RATES = ("matmul_flops", "attention_forward_flops", "attention_backward_flops")
"""Entries that hold several rates by name."""
PROFILES = Path(__file__).with_name("profiles")
"""Those that memplug comes with: configs/hardware, to which this is a link in the repository."""


@dataclass(frozen=True)
class Rate:
    """Something per second that depends on a size.

    Attributes:
        points: of (size, rate), sizes rising, none below 1. Between two of them the rate goes evenly with the size's
            logarithm; before the first and beyond the last one it stays.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def always(cls, rate: float) -> Rate:
        """The same for all sizes."""
        return cls(((1.0, rate),))

    def at(self, size: float) -> float:
        """For that size."""
        sizes, rates = zip(*self.points, strict=True)
        return float(np.interp(math.log(max(size, 1.0)), np.log(sizes), rates))


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU, and the host and link that it has.

    Attributes:
        name: of it, as torch gives it: a plan that was made for it is a real one's, too.
        memory_bytes: that a process can have.
        peak_flops: per second, of matrix products in bfloat16, as its vendor says it, or the most that was measured:
            model FLOP/s utilization is a share of it.
        matmul_flops: per second, of matrix products by dtype, such as "bfloat16"; sizes are a product's floating-point
            operations.
        attention_forward_flops, attention_backward_flops: per second, by back end, such as "flash": the first one is
            what programs have if nothing else is asked for. Sizes are keys of a sequence. As is usual 2 and 5
            floating-point operations for each pair of tokens and channel of the output count where attention is causal,
            and twice as many else.
        memory_bytes_per_s: read and written by operators, where that takes longer than what they compute.
        kernel_s: that no kernel takes less than.
        to_host_bytes_per_s, to_device_bytes_per_s: over the link, of pinned memory, while the other direction is idle;
            sizes are the bytes of a copy.
        to_host_both_bytes_per_s, to_device_both_bytes_per_s: of each direction while both are busy.
        copy_s: that a copy takes besides.
        launch_s: of the host, for each operator.
        observe_s, region_s, restore_s: of the host, for memplug's own work: more for an operator of a region, for a
            region's forward, and for its backward with a recompute pass (memplug/device/host_time.py).
        collective_bytes_per_s: to the other GPUs of the machine, each way: the bus bandwidth of nccl-tests.
        collective_s: that a collective takes besides.
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
    def named(cls, name: str | Path, folder: Path = PROFILES) -> Hardware:
        """Of a GPU that the folder has a profile of, such as "h200", in capitals or not; or of a file, by its path.

        Raises:
            HardwareError: there is neither; it names those that the folder has. Or the file is no profile.
        """
        known = {file.stem: file for file in sorted(folder.glob("*.json"))}
        file = known.get(str(name).lower()) or path_of(name, "hardware profile (.json)", HardwareError)
        if not file.is_file():
            raise HardwareError(
                f"no GPU {name!r}: there are {', '.join(known)}",
                "Name one of those, or the file of a profile: `memplug doctor --measure FILE` writes one of a GPU "
                "that is at hand.",
            )
        return cls.read(file)

    @classmethod
    def read(cls, file: Path) -> Hardware:
        """From a JSON file: an object of these attributes, each `{"value": ..., "from": ...}`, or several such by name.
        A rate's value is a number, or `[[size, rate], ...]`. It is from: "measured", "fitted" to steps that were
        measured, "published", "scaled": published, times the share of it that was fitted elsewhere; or "assumed".

        Raises:
            HardwareError: it is no such file.
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
                raise HardwareError(f"{where} is to have one rate or more by name")
        if set(values["attention_forward_flops"]) != set(values["attention_backward_flops"]):
            raise HardwareError(f"{file}: attention has other back ends in forward and backward")
        return cls(**values)

    def attention(self, backend: str | None) -> str:
        """The back end of that name; None: the first one.

        Raises:
            HardwareError: there is none of that name.
        """
        known = tuple(self.attention_forward_flops)
        if backend is not None and backend not in known:
            raise HardwareError(f"{self.name} has no attention {backend!r}: {', '.join(known)}", "Name one of those.")
        return backend or known[0]


def _value(entry: Any, where: str) -> Any:
    if not isinstance(entry, Mapping) or set(entry) != {"value", "from"}:
        raise HardwareError(f'{where} is to be {{"value": ..., "from": ...}}')
    if entry["from"] not in SOURCES:
        raise HardwareError(f"{where} is to say where it is from: {', '.join(SOURCES)}")
    return entry["value"]


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise HardwareError(f"{where} is to have a value above 0")
    return float(value)


def _rate(value: Any, where: str) -> Rate:
    if not isinstance(value, list):
        return Rate.always(_number(value, where))
    points = tuple(tuple(_number(each, where) for each in point) for point in value if isinstance(point, list))
    sizes = [point[0] for point in points if len(point) == 2]
    if not sizes or len(sizes) < len(value) or any(b <= a for a, b in zip(sizes, sizes[1:], strict=False)):
        raise HardwareError(f"{where} is to have a number, or [[size, rate], ...] with sizes rising")
    return Rate(points)
