"""Eight bits with a scale for each 32 elements."""

import transformer_engine_torch as tex

from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer


class MXFP8TensorStorage(QuantizedTensorStorage):
    """Transposed values have scales of their own."""


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor):
    """That autograd can save."""

    __init__ = QuantizedTensor.__init__
    size = QuantizedTensor.size


class MXFP8Quantizer(Quantizer):
    """Scales are powers of two."""

    storage_type, tensor_type = MXFP8TensorStorage, MXFP8Tensor
    scaling, block = tex.Scaling.power_of_two_block, 32
