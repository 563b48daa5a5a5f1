"""Eight bits with a scale for each 128 elements of a row."""

import transformer_engine_torch as tex

from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """Transposed values have scales of their own."""


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, QuantizedTensor):
    """That autograd can save."""

    __init__ = QuantizedTensor.__init__
    size = QuantizedTensor.size


class Float8BlockQuantizer(Quantizer):
    """One-dimensional blocks."""

    storage_type, tensor_type = Float8BlockwiseQTensorStorage, Float8BlockwiseQTensor
    scaling, block = tex.Scaling.block, 128
