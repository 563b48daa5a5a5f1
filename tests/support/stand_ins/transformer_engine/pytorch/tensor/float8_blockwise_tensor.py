"""Tensors in eight bits with a scale for each 128 elements of a row."""

import transformer_engine_torch as tex

from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """Storage whose transposed values have scales of their own."""


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, QuantizedTensor):
    """Storage that autograd can save."""

    __init__ = QuantizedTensor.__init__
    size = QuantizedTensor.size


class Float8BlockQuantizer(Quantizer):
    """Quantizes in one-dimensional blocks."""

    storage_type, tensor_type = Float8BlockwiseQTensorStorage, Float8BlockwiseQTensor
    scaling, block = tex.Scaling.block, 128
