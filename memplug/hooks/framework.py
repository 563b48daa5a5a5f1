"""The interface by which memplug uses a framework.

Each framework is one file of this folder with a subclass of `Framework`, and one entry in `memplug.hooks.frameworks`.
Several frameworks can share a target, such as a DeepSpeed engine with Hugging Face's layers.
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
    """Return the modules that are not inside another module of the list."""
    return [(name, module) for name, module in found if not any(lies_in(name, outer) for outer, _ in found)]


def instances(model: nn.Module, path: str) -> Layers:
    """Return a model's modules of the class at a dotted path, in the model's order; none if it was not imported."""
    package, _, name = path.rpartition(".")
    kind = getattr(sys.modules.get(package), name, ())  # `isinstance(module, ())` is always False
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]


def lies_in(name: str, outer: str) -> bool:
    """Return whether the module at the path `name` lies inside the one at `outer`; the path of the model is ""."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


@dataclass(frozen=True, slots=True)
class AttachTarget:
    """The target of `memplug.attach`.

    Attributes:
        model: the whole model.
        chunks: the modules that the training loop calls: the model, or the chunks of a pipeline stage.
        engine: the framework's object that drives the model; None if the user's own loop does.
        device: the engine's device; None stands for the device of the parameters.
        cache_uses: how the model's forwards use key-value caches.
    """

    model: nn.Module
    chunks: tuple[nn.Module, ...]
    engine: Any = None
    device: torch.device | None = None
    cache_uses: Uses = field(default_factory=Uses, compare=False)


class Framework:
    """Interface of one framework; by default its methods change and refuse nothing.

    memplug calls `claim`, `is_in`, `layers` and `is_expert` of all frameworks, and the other methods only of those
    whose `is_in` returned True for the target.
    """

    def claim(self, given: Any) -> AttachTarget | None:
        """Return the attach target if `given` is an engine or a list of modules of this framework, else None.

        Args:
            given: the object passed to `memplug.attach`.

        Raises:
            RegionError: `given` belongs to the framework, but memplug cannot attach to it.
        """

    def is_in(self, target: AttachTarget) -> bool:
        """Return whether this framework drives the target or defines its modules, without importing the framework."""
        raise NotImplementedError

    def layers(self, model: nn.Module) -> Layers:
        """Return the model's outermost layers in its order; they become the regions unless the block names others."""
        return ()

    def is_expert(self, module: nn.Module) -> bool:
        """Return whether a module contains experts of a mixture, whose memory depends on the router's choices."""
        return False

    def block(self, target: AttachTarget) -> MemplugConfig | None:
        """Return the "memplug" block of the engine's configuration; None without an engine of this framework."""

    def explain_off(self, target: AttachTarget) -> None:
        """Log why memplug is off, if the caller of `attach` passed no block and this framework can tell the reason."""

    def groups(self, target: AttachTarget) -> Sequence[Any]:
        """Return the process groups, or lists of ranks, that train the target together; empty if unknown."""
        return ()

    def check_block(self, config: MemplugConfig, ranks: Ranks) -> None:
        """Raise `ConfigError` if this framework does not support the block; all ranks that attach call it."""

    def check_attached(self, target: AttachTarget) -> None:
        """Raise `ConflictError` if the model's existing session was not attached to this target."""

    def check(self, target: AttachTarget, modules: Layers, config: MemplugConfig) -> None:
        """Raise `ConflictError`, `RegionError` or `UnsupportedVersionError` if the modules cannot run as regions."""

    def check_states(self, target: AttachTarget) -> None:
        """Raise `ConflictError` if this framework moves optimizer states or parameters itself."""

    def regathers(self, target: AttachTarget) -> bool:
        """Return whether the framework gathers parameters in every forward, also when a region runs again (ZeRO 3)."""
        return False

    def layout(self, target: AttachTarget) -> Mapping[str, int]:
        """Return how the job is split over its ranks, such as {"zero_stage": 2}; a plan is valid for one layout."""
        return {}

    def prepare(self, target: AttachTarget, name: str, config: MemplugConfig) -> Prepare | None:
        """Return a function that checks or changes a region's arguments; None leaves that to the next framework."""

    def hook(self, target: AttachTarget, modules: Layers, attached: AttachedModel) -> None:
        """Mark steps and micro-batches, and keep the framework's own work out of the regions.

        Register the undoing of each change with `attached.at_detach`.

        Args:
            target: the target of `memplug.attach`.
            modules: the modules of the session's regions, in the regions' order.
            attached: the session.

        Raises:
            PatchError: a symbol of the framework is missing.
        """
