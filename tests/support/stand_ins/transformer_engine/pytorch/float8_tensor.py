"""The old name of `transformer_engine.pytorch.tensor.float8_tensor`."""

from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

__all__ = ["Float8Tensor"]
