"""The file of a trace of values: the tensor values that one real step read, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from memplug.errors import EstimateError
from memplug.files import opened, path_of, write_whole
from memplug.hooks.regions import as_written

NUMBER = "aten::_local_scalar_dense"
"""The operator that returns an element of a tensor to the host."""
COPY = "aten::_to_copy"
"""The operator that copies a tensor to the host."""
MOST_BYTES = 1 << 20
"""Bytes of the largest tensor whose copy to the host is recorded."""


class Plain(BaseModel):
    """The base of this file's data classes: instances are frozen, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Output(Plain):
    """A tensor that an operator returned.

    Attributes:
        dtype: torch's name of the dtype, such as "int64".
        sizes: The tensor's sizes.
        values: All elements in row-major order; None: only the tensor's sizes were recorded.
    """

    dtype: str
    sizes: tuple[int, ...] = ()
    values: tuple[bool | int | float, ...] | None = None

    def tensor(self) -> torch.Tensor:
        """Make the tensor on the CPU, or on the meta device if only its sizes were recorded."""
        dtype = getattr(torch, self.dtype)
        if self.values is None:
            return torch.empty(self.sizes, dtype=dtype, device="meta")
        return torch.tensor(self.values, dtype=dtype, device="cpu").reshape(self.sizes)


class Read(Plain):
    """One run of an operator whose result depends on tensor values.

    Attributes:
        line: The source line of the program, such as "model.py:12".
        operator: The operator's name, such as "aten::nonzero".
        inputs: The sizes of each input tensor.
        outputs: The tensors that the operator returned.
    """

    line: str
    operator: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[Output, ...]


class Values(Plain):
    """All values that one step read, in program order.

    Attributes:
        memplug_values: The version of the file's format.
        calls: The reads of each module, by the module's path: one list of reads for each call, or a single list if all
            calls read the same values.
        backward: The reads in backward, without those of recomputed forwards.
    """

    memplug_values: Literal[1] = 1
    calls: dict[str, list[list[Read]]]
    backward: list[Read] = []

    @classmethod
    def read(cls, path: str | Path) -> Values:
        """Read a file that `memplug.record_values` wrote.

        Args:
            path: The file.

        Raises:
            EstimateError: The file cannot be read, or is not a trace of values.
        """
        with opened(
            path_of(path, "trace of values (.json)", EstimateError), "trace of values (.json)", EstimateError
        ) as file:
            text = file.read()
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            is_npz = text.startswith(b"PK")
            raise EstimateError(
                f"{path}: {'the trace of a recorded step (.npz)' if is_npz else 'no trace of values'}",
                "Give a file that `memplug.record_values` wrote with this version of memplug; "
                "traces of `session.record` are for `memplug show` and `memplug plan`.",
            ) from None

    def write(self, path: str | Path) -> None:
        """Write the trace to a file.

        Args:
            path: The file.

        Raises:
            EstimateError: The file cannot be written.
        """
        text = self.model_dump_json(exclude_none=True).encode()
        write_whole(Path(path), "trace of values", lambda file: file.write(text), EstimateError)


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's modules by their paths in the unwrapped model.

    A wrapper and the module that it wraps share a path; the result has the wrapped module.
    """
    named = dict(model.named_modules())
    return {as_written(name, named): module for name, module in named.items()}
