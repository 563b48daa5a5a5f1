"""A trace of values: what one real step read of its tensors, as JSON."""

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
"""The operator that gives the host a number of a tensor."""
COPY = "aten::_to_copy"
"""That copies a tensor to the host."""
MOST_BYTES = 1 << 20
"""Of a tensor whose copy on the host is kept."""


class Plain(BaseModel):
    """Of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Output(Plain):
    """A tensor that an operator gave.

    Attributes:
        dtype: as "int64".
        values: all of it, or a number; None: its sizes count.
    """

    dtype: str
    sizes: tuple[int, ...] = ()
    values: tuple[bool | int | float, ...] | None = None

    def tensor(self) -> torch.Tensor:
        """On the host, or where it has no values on torch's meta device."""
        dtype = getattr(torch, self.dtype)
        if self.values is None:
            return torch.empty(self.sizes, dtype=dtype, device="meta")
        return torch.tensor(self.values, dtype=dtype, device="cpu").reshape(self.sizes)


class Read(Plain):
    """One operator whose result depends on values.

    Attributes:
        line: of the program, as "model.py:12".
        operator: as "aten::nonzero".
        inputs: sizes of its tensors.
    """

    line: str
    operator: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[Output, ...]


class Values(Plain):
    """In order of the program.

    Attributes:
        calls: by the module's path in the model, for each of its calls in one forward; one, where all read the same.
        backward: what its backward read outside of forwards.
    """

    memplug_values: Literal[1] = 1
    calls: dict[str, list[list[Read]]]
    backward: list[Read] = []

    @classmethod
    def read(cls, path: str | Path) -> Values:
        """Of a file that `memplug.record_values` wrote.

        Raises:
            EstimateError: it cannot be read, or is something else.
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
                "Give the file that `memplug.record_values` has written, in a version of memplug that is the same; "
                "traces of `session.record` are for `memplug show` and `memplug plan`.",
            ) from None

    def write(self, path: str | Path) -> None:
        """Raises EstimateError: it cannot be written there."""
        text = self.model_dump_json(exclude_none=True).encode()
        write_whole(Path(path), "trace of values", lambda file: file.write(text), EstimateError)


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """By path in the model as it was written: of a wrapper and what it wraps, the latter."""
    named = dict(model.named_modules())
    return {as_written(name, named): module for name, module in named.items()}
