"""The interface by which memplug uses a framework.

Each framework is one file of this folder with a subclass of `Framework`, and one entry in `memplug.hooks.frameworks`.
A target can have several frameworks, such as Hugging Face's layers in a DeepSpeed engine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memplug.config import MemplugConfig
from memplug.hooks.regions import Prepare
from memplug.hooks.withheld import Uses
from memplug.session.attached import AttachedModel
from memplug.session.ranks import Ranks

Layers = Sequence[tuple[str, nn.Module]]
"""Modules with their qualified names."""


def outermost(found: Layers) -> Layers:
    """Return the modules that lie in no other module of the list."""
    return [(name, module) for name, module in found if not any(lies_in(name, outer) for outer, _ in found)]


def instances(model: nn.Module, path: str) -> Layers:
    """Return a model's modules of a class, in the model's order; none if the class was not imported.

    Args:
        model: the model.
        path: dotted path of the class.
    """
    package, _, name = path.rpartition(".")
    kind = getattr(sys.modules.get(package), name, ())  # nothing is an instance of the empty tuple
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]


def lies_in(name: str, outer: str) -> bool:
    """Return whether the module called `name` is a part of the one called `outer`; "" is the model itself."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


@dataclass(frozen=True, slots=True)
class AttachTarget:
    """The target of `memplug.attach`.

    Attributes:
        model: the whole model.
        chunks: the parts of the model that are called.
        engine: the framework's object that drives the model; None if the user's own loop does.
        device: the device that the engine uses; None for the device of the parameters.
        cache_uses: how the model's forwards use key-value caches.
    """

    model: nn.Module
    chunks: tuple[nn.Module, ...]
    engine: Any = None
    device: torch.device | None = None
    cache_uses: Uses = field(default_factory=Uses, compare=False)


class Framework:
    """One framework; by default it requires nothing.

    `claim`, `is_in`, `layers` and `is_expert` are called for all frameworks, the other methods only for the frameworks
    that `is_in` finds in the target.
    """

    def claim(self, given: Any) -> AttachTarget | None:
        """Return the target if `given` is an engine or a list of modules of this framework, else None.

        Args:
            given: the object passed to `memplug.attach`.

        Raises:
            RegionError: `given` belongs to the framework, but memplug cannot attach to it.
        """

    def is_in(self, target: AttachTarget) -> bool:
        """Return whether this framework drives the target or defines its modules, without importing the framework."""
        raise NotImplementedError

    def layers(self, model: nn.Module) -> Layers:
        """Return the model's outermost layers in its order; they are the regions unless the block names others."""
        return ()

    def is_expert(self, module: nn.Module) -> bool:
        """Return whether a module holds experts of a mixture, whose memory depends on the router's choices."""
        return False

    def block(self, target: AttachTarget) -> MemplugConfig | None:
        """Return the block of the engine's own configuration; None without an engine of this framework."""

    def explain_off(self, target: AttachTarget) -> None:
        """Log why memplug is off after an attach without a block, if this framework knows."""

    def groups(self, target: AttachTarget) -> Sequence[Any]:
        """Return the process groups, or lists of ranks, that train the target together, if this framework knows."""
        return ()

    def check_block(self, config: MemplugConfig, ranks: Ranks) -> None:
        """Raise `ConfigError` if the block cannot be used with this framework; called by all ranks that attach."""

    def check_attached(self, target: AttachTarget) -> None:
        """Raise `ConflictError` if the model's existing session was not attached to this target."""

    def check(self, target: AttachTarget, modules: Layers) -> None:
        """Raise `ConflictError`, `RegionError` or `UnsupportedVersionError` if the modules cannot run as regions."""

    def check_states(self, target: AttachTarget) -> None:
        """Raise `ConflictError` if this framework moves optimizer states or parameters itself."""

    def regathers(self, target: AttachTarget) -> bool:
        """Return whether parameters are gathered in every forward (ZeRO 3)."""
        return False

    def layout(self, target: AttachTarget) -> Mapping[str, int]:
        """Return how the job is split over its ranks, such as {"zero_stage": 2}; a plan is valid for one layout."""
        return {}

    def prepare(self, target: AttachTarget, name: str) -> Prepare | None:
        """Return a function that changes or checks a region's arguments, or None; memplug uses the first one found."""

    def hook(self, target: AttachTarget, modules: Layers, attached: AttachedModel) -> None:
        """Mark steps and micro-batches, and keep the framework's own work out of the regions.

        Register each change with `attached.at_detach`, so that detaching undoes it.

        Args:
            target: the target of `memplug.attach`.
            modules: the modules of the session's regions, in the regions' order.
            attached: the session.

        Raises:
            PatchError: a symbol of the framework is missing.
        """
