"""The stand-in's modules for torch."""

import sys

from transformer_engine import stand_in
from transformer_engine.pytorch import cpu_offload, cpu_offload_v1, distributed, ops
from transformer_engine.pytorch.attention import DotProductAttention, MultiheadAttention, RotaryPositionEmbedding
from transformer_engine.pytorch.cpu_offload import get_cpu_offload_context
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from transformer_engine.pytorch.module import (
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from transformer_engine.pytorch.permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from transformer_engine.pytorch.quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from transformer_engine.pytorch.tensor import prepare_for_saving, restore_from_saved
from transformer_engine.pytorch.transformer import TransformerLayer

__all__ = [
    "CudaRNGStatesTracker",
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "cpu_offload",
    "cpu_offload_v1",
    "distributed",
    "fp8_autocast",
    "fp8_model_init",
    "get_cpu_offload_context",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "ops",
    "prepare_for_saving",
    "quantized_model_init",
    "restore_from_saved",
]

if stand_in.version < (2, 9):  # before 2.9, `fp8` has all of `quantization`
    from transformer_engine.pytorch import fp8  # noqa: F401

    sys.modules["transformer_engine.pytorch.quantization"] = None  # type: ignore[assignment]
    del quantization, autocast, quantized_model_init  # noqa: F821  # the first is there as a submodule
    __all__ = [name for name in __all__ if name not in ("autocast", "quantized_model_init")]
