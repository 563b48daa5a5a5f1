"""Recipes of quantization: the fields and predicates of the real recipes that the stand-in needs."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """The eight-bit formats of forward and backward."""

    E4M3 = _FormatHelper(max_fwd=448.0, max_bwd=448.0)
    E5M2 = _FormatHelper(max_fwd=57344.0, max_bwd=57344.0)
    HYBRID = _FormatHelper(max_fwd=E4M3[0], max_bwd=E5M2[0])


class Recipe:
    """The predicates of all recipes."""

    def delayed(self) -> bool:
        """Return whether scales follow from earlier steps."""
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        """Return whether each tensor has one scale, from its own values."""
        return isinstance(self, Float8CurrentScaling)

    def mxfp8(self) -> bool:
        """Return whether every 32 elements have a scale, a power of two."""
        return isinstance(self, MXFP8BlockScaling)

    def float8_block_scaling(self) -> bool:
        """Return whether every 128 elements have a scale."""
        return isinstance(self, Float8BlockScaling)

    def float8_per_tensor_scaling(self) -> bool:
        """Return whether each tensor has one scale."""
        return self.delayed() or self.float8_current_scaling()

    def nvfp4(self) -> bool:
        """Return False: the stand-in has no four-bit formats."""
        return False

    def custom(self) -> bool:
        """Return False: the stand-in has no custom quantizers."""
        return False


@dataclasses.dataclass()
class DelayedScaling(Recipe):
    """Scales from the largest magnitudes of earlier steps."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    override_linear_precision: Any = (False, False, False)
    interval: int = -1
    params_dtype: Any = None
    device: Any = None

    def __post_init__(self) -> None:
        if callable(self.amax_compute_algo) or self.scaling_factor_compute_algo is not None:
            raise NotImplementedError("the stand-in's scales follow its own kernels, not functions of yours")
        if self.fp8_dpa or self.fp8_mha:
            raise NotImplementedError("the stand-in's attention is not in FP8")

    def __repr__(self) -> str:
        fields = "margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax"
        return ", ".join([type(self).__name__, *(f"{name}={getattr(self, name)}" for name in fields)])


@dataclasses.dataclass()
class Float8CurrentScaling(Recipe):
    """Scales from a tensor's own largest magnitude."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclasses.dataclass()
class MXFP8BlockScaling(Recipe):
    """One scale for each 32 elements."""

    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclasses.dataclass()
class Float8BlockScaling(Recipe):
    """One scale for each 128 elements (the real one's weights have blocks of 128 x 128)."""

    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


class NVFP4BlockScaling(Recipe):
    """A recipe that the stand-in lacks."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError("the stand-in has no FP4")


class CustomRecipe(Recipe):
    """A recipe that the stand-in lacks."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError("the stand-in has no custom recipes")
