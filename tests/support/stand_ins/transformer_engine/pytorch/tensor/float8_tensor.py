"""Tensors in eight bits with one scale."""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine_torch as tex

from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer


class Float8TensorStorage(QuantizedTensorStorage):
    """Storage with one inverse scale for both layouts, as in the real package."""

    @property
    def _data(self) -> torch.Tensor | None:
        return self.rowwise[0] if self.rowwise else None

    @property
    def _transpose(self) -> torch.Tensor | None:
        return self.columnwise[0] if self.columnwise else None

    @property
    def _scale_inv(self) -> torch.Tensor:
        return (self.rowwise or self.columnwise)[1]

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], QuantizedTensorStorage]:
        """Return the elements, their transpose, and the inverse scale."""
        tensors = [self._data, self._transpose, self._scale_inv]
        self.rowwise = self.columnwise = None
        return tensors, self

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take this storage's tensors back from the front of the list, and return the others."""
        data, transpose, scale_inv = tensors[:3]
        self.rowwise = None if data is None else (data, scale_inv)
        self.columnwise = None if transpose is None else (transpose, scale_inv)
        return tensors[3:]


class Float8Tensor(Float8TensorStorage, QuantizedTensor):
    """Storage that autograd can save."""

    __init__ = QuantizedTensor.__init__
    size = QuantizedTensor.size


class Float8Quantizer(Quantizer):
    """Delayed scaling: reads a scale of the module's state, and records the largest magnitude there."""

    storage_type, tensor_type = Float8TensorStorage, Float8Tensor
    scaling = tex.Scaling.delayed

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype: torch.dtype, **usage: Any):
        super().__init__(fp8_dtype, **usage)
        self.scale, self.amax = scale, amax


class Float8CurrentScalingQuantizer(Quantizer):
    """Computes a scale from the tensor's own values."""

    storage_type, tensor_type = Float8TensorStorage, Float8Tensor
    scaling = tex.Scaling.current
