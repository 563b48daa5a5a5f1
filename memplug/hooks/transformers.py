"""Hugging Face models: which modules are decoder layers, and what training must not do at the same time."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from memplug.errors import ConflictError
from memplug.hooks.framework import Framework, Layers, Target, instances, lies_in, outermost
from memplug.hooks.regions import Prepare

LAYER_CLASS = "transformers.modeling_layers.GradientCheckpointingLayer"  # transformers >= 4.53
CACHE_ARGUMENTS = ("cache", "past_key_values")  # of a layer's forward: since transformers 5.24, and before


class Transformers(Framework):
    """See `Framework`. Any model may be made of its layers: a class of one's own may take a key-value cache too."""

    def is_in(self, target: Target) -> bool:
        return True

    def layers(self, model: nn.Module) -> Layers:
        """The outermost modules of the class that transformers gives every checkpointable layer."""
        return outermost(instances(model, LAYER_CLASS))

    def is_expert(self, module: nn.Module) -> bool:
        return "Experts" in type(module).__name__

    def check(self, target: Target, modules: Layers) -> None:
        for name, _ in modules:
            check_checkpointing_is_off(layers_around(target.model, name))

    def prepare(self, target: Target, name: str) -> Prepare:
        return functools.partial(arguments, layers_around(target.model, name))


def layers_around(model: nn.Module, region: str) -> Layers:
    """The checkpointable layers that share operators with a region: it is one, lies in one or contains some."""
    return [
        (name, layer)
        for name, layer in instances(model, LAYER_CLASS)
        if name == region or lies_in(name, region) or lies_in(region, name)
    ]


def check_checkpointing_is_off(layers: Layers) -> None:
    """Raises `ConflictError` where a layer's own gradient checkpointing is on: it would recompute the same layer."""
    for name, layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            raise ConflictError(
                f"gradient checkpointing of {name or type(layer).__name__} is on, and memplug recomputes it too",
                "Set `gradient_checkpointing=False` in the trainer's arguments (TRL's default is True), or call "
                "`model.gradient_checkpointing_disable()`: memplug takes its place.",
            )


def arguments(
    layers: Layers, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a region in training: without the key-value cache that models make by default.

    A recompute pass would fill it again.

    Args:
        layers: `layers_around` the region.

    Raises:
        ConflictError: the cache holds tokens of this layer already, or checkpointing was switched on since attaching.
    """
    check_checkpointing_is_off(layers)
    name = next((name for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
    if name is None:
        return args, kwargs
    cache = kwargs[name]
    index = next((part.layer_idx for part in module.modules() if hasattr(part, "layer_idx")), 0)
    if cache.get_seq_length(index):
        raise ConflictError(
            "a decoder layer trains with a key-value cache that already holds tokens; recomputation would append to "
            "it again",
            'Train with `use_cache=False`, or leave these layers out of "tokenwise.regions".',
        )
    return args, {**kwargs, name: None}
