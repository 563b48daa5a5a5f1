"""Adapts Hugging Face models: finds their decoder layers, and copies their caches.

`memplug.hooks.checkpointing` replaces gradient checkpointing. If the block says "refuse", this file raises instead.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from memplug.config import MemplugConfig
from memplug.errors import ConflictError
from memplug.hooks import caches
from memplug.hooks.framework import AttachTarget, Framework, Layers, instances, lies_in, outermost
from memplug.hooks.regions import Call, Prepare
from memplug.hooks.withheld import Uses

LAYER_CLASS = "transformers.modeling_layers.GradientCheckpointingLayer"  # transformers >= 4.53


class Transformers(Framework):
    """Hugging Face's layers and caches. It handles every target, since a user's own layers may take a cache too."""

    def is_in(self, target: AttachTarget) -> bool:
        """Return True, since any model may contain such layers or take a cache."""
        return True

    def layers(self, model: nn.Module) -> Layers:
        """Return the outermost of the layers that support gradient checkpointing (`LAYER_CLASS`)."""
        return outermost(instances(model, LAYER_CLASS))

    def is_expert(self, module: nn.Module) -> bool:
        """Return whether the name of a module's class contains "Experts"."""
        return "Experts" in type(module).__name__

    def check(self, target: AttachTarget, modules: Layers, config: MemplugConfig) -> None:
        """Raise `ConflictError` if gradient checkpointing is on in or around a region, and the block refuses it."""
        for name, _ in modules if config.tokenwise.checkpointing == "refuse" else ():
            check_checkpointing_is_off(layers_around(target.model, name))

    def prepare(self, target: AttachTarget, name: str, config: MemplugConfig) -> Prepare:
        """Return the function that gives a region copies of its caches."""
        refused = layers_around(target.model, name) if config.tokenwise.checkpointing == "refuse" else ()
        return functools.partial(arguments, refused, name, target.cache_uses)


def layers_around(model: nn.Module, region: str) -> Layers:
    """Return the layers that support gradient checkpointing and are the region, lie in it or contain it."""
    return [
        (name, layer)
        for name, layer in instances(model, LAYER_CLASS)
        if name == region or lies_in(name, region) or lies_in(region, name)
    ]


def check_checkpointing_is_off(layers: Layers) -> None:
    """Raise `ConflictError` if gradient checkpointing is on in a layer, which memplug recomputes as well."""
    for name, layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            raise ConflictError(
                f"gradient checkpointing of {name or type(layer).__name__} is on, and memplug recomputes it too",
                "Set `gradient_checkpointing=False` in the trainer's arguments (TRL's default is True), call "
                "`model.gradient_checkpointing_disable()`, or let memplug replace it: "
                '"tokenwise": {"checkpointing": "replace"}.',
                code="MP002",
            )


def arguments(
    refused: Layers,
    region: str,
    uses: Uses,
    module: nn.Module,
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
    """Return a region's forward and arguments, changed so that each run gets its own copies of the key-value caches.

    A region that runs again in backward needs the caches as they were before its forward (`memplug.hooks.caches`).
    Models make such caches by default, also in training. `refused` are the layers whose gradient checkpointing must be
    off.

    Raises:
        ConflictError: memplug withheld tensors of a cache and cannot make them again, or checkpointing was switched on
            after attaching.
    """
    check_checkpointing_is_off(refused)
    if not any(map(caches.is_cache, (*args, *kwargs.values()))):
        return call, args, kwargs

    def found(value: Any) -> Any:
        return caches.FoundCache(value, region, uses) if caches.is_cache(value) else value

    kwargs = {name: found(value) for name, value in kwargs.items()}
    return functools.partial(caches.run, call), tuple(map(found, args)), kwargs
