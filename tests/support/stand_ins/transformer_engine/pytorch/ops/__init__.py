"""TE's operation-based interface: its normalizations and activations."""

from transformer_engine.pytorch.ops.basic import (
    GEGLU,
    GELU,
    AllReduce,
    BasicLinear,
    Bias,
    FusibleOperation,
    LayerNorm,
    ReduceScatter,
    ReGLU,
    ReLU,
    RMSNorm,
    Sequential,
    SiLU,
    SwiGLU,
)

__all__ = [
    "GEGLU",
    "GELU",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "FusibleOperation",
    "LayerNorm",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Sequential",
    "SiLU",
    "SwiGLU",
]
