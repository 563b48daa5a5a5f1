"""Hugging Face models: finds their decoder layers, refuses gradient checkpointing, copies their caches."""

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
    """Hugging Face's layers and caches. Counts as part of every target: a user's own class may take a cache too."""

    def is_in(self, target: AttachTarget) -> bool:
        """Return True: any model may contain such layers."""
        return True

    def layers(self, model: nn.Module) -> Layers:
        """Return the outermost modules of the class that transformers gives every checkpointable layer."""
        return outermost(instances(model, LAYER_CLASS))

    def is_expert(self, module: nn.Module) -> bool:
        """Return whether a module's class is named as one with experts."""
        return "Experts" in type(module).__name__

    def check(self, target: AttachTarget, modules: Layers) -> None:
        """Raise `ConflictError` if gradient checkpointing is on in a layer that shares operators with a region."""
        for name, _ in modules:
            check_checkpointing_is_off(layers_around(target.model, name))

    def prepare(self, target: AttachTarget, name: str) -> Prepare:
        """Return the function that gives a region copies of its caches."""
        return functools.partial(arguments, layers_around(target.model, name), name, target.cache_uses)


def layers_around(model: nn.Module, region: str) -> Layers:
    """Return the checkpointable layers that are the region, lie in it or contain it."""
    return [
        (name, layer)
        for name, layer in instances(model, LAYER_CLASS)
        if name == region or lies_in(name, region) or lies_in(region, name)
    ]


def check_checkpointing_is_off(layers: Layers) -> None:
    """Raise `ConflictError` if gradient checkpointing is on in a layer: both would recompute it."""
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
    """Return a region's forward and arguments in training, with copies of the key-value caches.

    Models make such caches by default, also in training.

    Args:
        layers: `layers_around` the region.
        region: the region's name.
        uses: the model's uses of caches.
        module: the region's module.
        call: its forward.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        ConflictError: tensors of a cache are gone, or checkpointing was switched on since attaching.
    """
    check_checkpointing_is_off(layers)
    if not any(map(caches.is_cache, (*args, *kwargs.values()))):
        return call, args, kwargs

    def found(value: Any) -> Any:
        return caches.FoundCache(value, region, uses) if caches.is_cache(value) else value

    kwargs = {name: found(value) for name, value in kwargs.items()}
    return functools.partial(caches.run, call), tuple(map(found, args)), kwargs
