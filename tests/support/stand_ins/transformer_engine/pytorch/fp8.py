"""The old name of `transformer_engine.pytorch.quantization`."""

from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    Recipe,
)
from transformer_engine.pytorch.quantization import (
    DelayedScalingRecipeState,
    FP8GlobalStateManager,
    RecipeState,
    check_fp8_support,
    fp8_autocast,
    fp8_model_init,
    get_default_fp8_recipe,
    get_fp8_max,
    get_fp8_torch_dtype,
)

__all__ = [
    "DelayedScaling",
    "DelayedScalingRecipeState",
    "FP8GlobalStateManager",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "Recipe",
    "RecipeState",
    "check_fp8_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "get_fp8_max",
    "get_fp8_torch_dtype",
]
