"""Tensors in eight bits with a scale for each 32 elements."""

import transformer_engine_torch as tex

from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer


class MXFP8TensorStorage(QuantizedTensorStorage):
    """Storage whose transposed values have scales of their own."""


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor):
    """Storage that autograd can save."""

    __init__ = QuantizedTensor.__init__
    size = QuantizedTensor.size


class MXFP8Quantizer(Quantizer):
    """Quantizes with scales that are powers of two."""

    storage_type, tensor_type = MXFP8TensorStorage, MXFP8Tensor
    scaling, block = tex.Scaling.power_of_two_block, 32
