"""Makes CUDA, real or simulated, the default device of tests that otherwise run on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def cuda_by_default() -> Iterator[None]:
    """Make CUDA torch's default device inside the `with`; draws from a CPU generator are made on the CPU and moved."""
    torch.cuda.init()
    with torch.device("cuda"), SeededOnTheHost():
        yield


def skip_those_of_the_cpu(items: list[pytest.Item]) -> None:
    """Skip tests marked `cpu`, with the mark's reason."""
    for item in items:
        mark = item.get_closest_marker("cpu")
        if mark is not None:
            item.add_marker(pytest.mark.skip(reason=f"of the CPU alone: {mark.args[0]}"))


class SeededOnTheHost(TorchFunctionMode):
    """Draws random tensors on the CPU if their generator is the CPU's, and moves them to the default device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        makes = generator is not None and kwargs.get("device") is None and not any(map(torch.is_tensor, args))
        if makes and generator.device.type == "cpu":
            return func(*args, **{**kwargs, "device": "cpu"}).to(torch.get_default_device())
        return func(*args, **kwargs)
