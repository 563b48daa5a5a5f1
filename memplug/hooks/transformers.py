"""Hugging Face models: which modules are decoder layers, and what training must not do at the same time."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from memplug.errors import ConflictError
from memplug.hooks import caches
from memplug.hooks.framework import AttachTarget, Framework, Layers, instances, lies_in, outermost
from memplug.hooks.regions import Call, Prepare
from memplug.hooks.withheld import Uses

LAYER_CLASS = "transformers.modeling_layers.GradientCheckpointingLayer"  # transformers >= 4.53


class Transformers(Framework):
    """See `Framework`. Any model may be made of its layers: a class of one's own may take a key-value cache too."""

    def is_in(self, target: AttachTarget) -> bool:
        return True

    def layers(self, model: nn.Module) -> Layers:
        """The outermost modules of the class that transformers gives every checkpointable layer."""
        return outermost(instances(model, LAYER_CLASS))

    def is_expert(self, module: nn.Module) -> bool:
        return "Experts" in type(module).__name__

    def check(self, target: AttachTarget, modules: Layers) -> None:
        for name, _ in modules:
            check_checkpointing_is_off(layers_around(target.model, name))

    def prepare(self, target: AttachTarget, name: str) -> Prepare:
        return functools.partial(arguments, layers_around(target.model, name), name, target.cache_uses)


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
                code="MP002",
            )


def arguments(
    layers: Layers,
    region: str,
    uses: Uses,
    module: nn.Module,
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
    """A forward of a region in training, on copies of its key-value caches, which models make by default.

    Args:
        layers: `layers_around` the region.
        uses: what the model's forwards do with caches.

    Raises:
        ConflictError: what a cache held is gone, or checkpointing was switched on since attaching.
    """
    check_checkpointing_is_off(layers)
    if not any(map(caches.is_cache, (*args, *kwargs.values()))):
        return call, args, kwargs

    def found(value: Any) -> Any:
        return caches.FoundCache(value, region, uses) if caches.is_cache(value) else value

    kwargs = {name: found(value) for name, value in kwargs.items()}
    return functools.partial(caches.run, call), tuple(map(found, args)), kwargs
