"""Hugging Face models: which modules are decoder layers, and what training must not do at the same time."""

from __future__ import annotations

import logging
import sys
from typing import Any

from torch import nn

from memplug.errors import ConflictError

log = logging.getLogger("memplug")

LAYER_CLASS = "transformers.modeling_layers.GradientCheckpointingLayer"  # transformers >= 4.53


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost modules of the class that transformers gives every checkpointable layer, with their names; empty where transformers is not in use."""
    module = sys.modules.get("transformers.modeling_layers")
    layer_class = getattr(module, "GradientCheckpointingLayer", None)
    if layer_class is None:
        return []
    found: list[tuple[str, nn.Module]] = []
    for name, candidate in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(candidate, layer_class) and not inside:
            found.append((name, candidate))
    return found


def check_checkpointing_is_off(name: str, layer: nn.Module) -> None:
    """Raises `ConflictError` where the layer's own gradient checkpointing is on: it would recompute what memplug has swapped."""
    if getattr(layer, "gradient_checkpointing", False):
        raise ConflictError(
            f"gradient checkpointing of {name} is on, and memplug recomputes the same layer",
            "Call `model.gradient_checkpointing_disable()` (Trainer: gradient_checkpointing=False): memplug takes its place.",
        )


def prepare_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a decoder layer in training: without the empty key-value cache that models make by default, which a recompute pass would fill again.

    Raises:
        ConflictError: the cache holds tokens already, or checkpointing was switched on since.
    """
    check_checkpointing_is_off(type(layer).__name__, layer)
    cache = kwargs.get("past_key_values")
    if cache is None:
        return args, kwargs
    if cache.get_seq_length():
        raise ConflictError(
            "a decoder layer trains with a key-value cache that already holds tokens; recomputation would append to it again",
            "Train with `use_cache=False`, or leave these layers out of \"tokenwise.regions\".",
        )
    return args, {**kwargs, "past_key_values": None}
