"""The kernels of the stand-ins of Transformer Engine and flash-attn, and counts of their runs.

They are built from ../kernels on first use and kept, like memplug's own C++. torch's dispatcher, modes and profiler do
not see the kernels, only the memory that these request.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from memplug.native.building import Extension

_KERNELS = Extension(
    name="stand_in_kernels",
    what="stand-ins' kernels",
    folders=(Path(__file__).parents[1] / "kernels",),
)


class Calls:
    """Counts of runs since the process began, or since `clear`.

    Attributes:
        kernels: name -> launches, in this process.
        functions: name of an autograd Function -> forwards; a recompute counts again.
        flops: name of a kernel -> floating-point operations of its matrix products.
    """

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()

    def ran(self, kernel: str, flops: int = 0) -> None:
        """Count a launch of a kernel."""
        self.kernels[kernel] += 1
        self.flops[kernel] += flops

    def forward(self, function: str) -> None:
        """Count a forward of a Function."""
        self.functions[function] += 1

    def clear(self) -> None:
        """Reset all counts."""
        for counter in (self.kernels, self.functions, self.flops):
            counter.clear()


calls = Calls()
settings = {"transformer_engine": "2.10.0"}
"""The version that the stand-in of Transformer Engine reports; set it before any part of that stand-in is imported."""
native: Any = _KERNELS.load()


def draw_seeds(like: torch.Tensor, dropped: bool) -> torch.Tensor:
    """Return int64[2] on the device of `like`, drawn from its default generator; zeros if nothing is dropped."""
    if not dropped:
        return native.seeds(like, 0, 0)
    if not like.is_cuda:
        return native.seeds(like, *native.next_random())
    generator = torch.cuda.default_generators[like.device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return native.seeds(like, generator.initial_seed(), offset)
