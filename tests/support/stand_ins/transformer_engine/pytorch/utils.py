"""Small functions that all modules use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def clear_tensor_data(*tensors: Any) -> None:
    """Free the memory of tensors that are not read any more; all references to these tensors become empty."""
    for tensor in tensors:
        if tensor is None or hasattr(tensor, "_do_not_clear"):
            continue
        if hasattr(tensor, "clear"):
            tensor.clear()
        else:
            tensor.data = _empty_tensor(tensor.device)


@functools.cache
def _empty_tensor(device: torch.device) -> torch.Tensor:
    return torch.empty(0, device=device)


def cast_if_needed(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the tensor itself, or cast."""
    if tensor is None or tensor.dtype == dtype:
        return tensor
    with torch.enable_grad():
        return tensor.to(dtype=dtype)


def divide(numerator: int, denominator: int) -> int:
    """Divide without a remainder."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"
    return numerator // denominator


def requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Return whether any tensor requires a gradient."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def init_method_constant(value: float) -> Callable[[torch.Tensor], Any]:
    """Return a function that fills a tensor with a number."""
    return lambda tensor: torch.nn.init.constant_(tensor, value)


def get_default_init_method() -> Callable[[torch.Tensor], Any]:
    """Return the real package's default initialization."""
    return lambda tensor: torch.nn.init.normal_(tensor, mean=0.0, std=0.023)


def refuse(**asked: Any) -> None:
    """Raise NotImplementedError for arguments that would change results, and that the stand-in does not support."""
    for name, value in asked.items():
        if value:
            raise NotImplementedError(f"the stand-in of Transformer Engine does not do {name}={value!r}")


def default_device() -> str:
    """Return the default device of parameters: CUDA if there is any (the real package always uses "cuda")."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def get_device_compute_capability() -> tuple[int, int]:
    """Return a Hopper GPU's capability."""
    return (9, 0)


def get_cudnn_version() -> tuple[int, int, int]:
    """Return cuDNN's version at the time of Transformer Engine 2.10."""
    return (9, 14, 0)


def is_bf16_available(return_reason: bool = False) -> Any:
    """Return True."""
    return (True, "") if return_reason else True


def is_bf16_compatible() -> bool:
    """Return True."""
    return True
