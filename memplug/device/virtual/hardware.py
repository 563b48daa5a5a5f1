"""What a GPU does in a second: the rates that `memplug.device.virtual` counts with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from memplug.errors import HardwareError

SOURCES = ("measured", "fitted", "published", "scaled")


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU, and the host and link that it has.

    Attributes:
        name: of it.
        memory_bytes: that a process can have.
        matmul_flops: per second, of matrix products in bfloat16.
        attention_forward_flops, attention_backward_flops: per second; as is usual 2 and 5 floating-point operations for
            each pair of tokens and channel of the output count where attention is causal, and twice as many else.
        memory_bytes_per_s: read and written by all other operators.
        kernel_s: that no kernel takes less than.
        to_host_bytes_per_s, to_device_bytes_per_s: over the link, of pinned memory.
        copy_s: that a copy takes besides.
        launch_s: of the host, for each operator.
    """

    name: str
    memory_bytes: float
    matmul_flops: float
    attention_forward_flops: float
    attention_backward_flops: float
    memory_bytes_per_s: float
    kernel_s: float
    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    copy_s: float
    launch_s: float

    @classmethod
    def read(cls, file: Path) -> Hardware:
        """From a JSON file: an object of these attributes, each `{"value": ..., "from": ...}`: "measured", "fitted" to
        steps that were measured, "published", or "scaled": published, times the share of it that was fitted elsewhere.

        Raises:
            HardwareError: it is no such file.
        """
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise HardwareError(f"{file}: {error}") from error
        names = [field.name for field in fields(cls)]
        if not isinstance(found, Mapping) or set(found) != set(names):
            raise HardwareError(f"{file}: a hardware profile has {', '.join(names)}")
        for name, entry in found.items():
            if name == "name":
                continue
            value = entry.get("value") if isinstance(entry, Mapping) else None
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise HardwareError(f"{file}: {name} is to have a value above 0")
            if entry.get("from") not in SOURCES:
                raise HardwareError(f"{file}: {name} is to say where it is from: {', '.join(SOURCES)}")
        return cls(name=found["name"], **{name: float(found[name]["value"]) for name in names if name != "name"})
