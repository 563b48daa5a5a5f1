"""What memplug asks of a framework. Each is one file of this folder with a subclass of `Framework`, and one entry in
`memplug.hooks.frameworks`; several can be in one target, such as Hugging Face's layers in a DeepSpeed engine.
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
    """Those modules that lie in no other one of them."""
    return [(name, module) for name, module in found if not any(lies_in(name, outer) for outer, _ in found)]


def instances(model: nn.Module, path: str) -> Layers:
    """A model's modules of a class, given by its dotted path, in the model's order; none before its import."""
    package, _, name = path.rpartition(".")
    kind = getattr(sys.modules.get(package), name, ())  # nothing is an instance of the empty tuple
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]


def lies_in(name: str, outer: str) -> bool:
    """Whether the module of one qualified name is a part of another one's; "" is the model's."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


@dataclass(frozen=True, slots=True)
class AttachTarget:
    """What `memplug.attach` was given.

    Attributes:
        model: all of it.
        chunks: the parts of it that are called.
        engine: what drives it, an object of a framework; None where the user's own loop does.
        device: where the engine puts it; None: where its parameters are.
        cache_uses: what its forwards do with key-value caches.
    """

    model: nn.Module
    chunks: tuple[nn.Module, ...]
    engine: Any = None
    device: torch.device | None = None
    cache_uses: Uses = field(default_factory=Uses, compare=False)


class Framework:
    """One framework, which by default asks for nothing.

    `claim`, `layers` and `is_expert` are asked of all frameworks, the rest only of those that are in the target.
    """

    def claim(self, given: Any) -> AttachTarget | None:
        """The target, where memplug was given an engine or a list of modules of this framework's; else None.

        Raises:
            RegionError: it is the framework's, and cannot be attached to.
        """

    def is_in(self, target: AttachTarget) -> bool:
        """Whether the target is driven by, or made of, this framework; without importing it."""
        raise NotImplementedError

    def layers(self, model: nn.Module) -> Layers:
        """The model's layers, outermost ones only, in the model's order: the regions, unless the block names others."""
        return ()

    def is_expert(self, module: nn.Module) -> bool:
        """Whether it holds experts of a mixture, whose memory depends on where the router sends the tokens."""
        return False

    def block(self, target: AttachTarget) -> MemplugConfig | None:
        """The block of the engine's own configuration; None where there is no engine of this framework's."""

    def explain_off(self, target: AttachTarget) -> None:
        """Attached without a block, and memplug is off: log why, if this framework knows."""

    def groups(self, target: AttachTarget) -> Sequence[Any]:
        """Process groups, or lists of ranks, that train the target together, where this framework knows."""
        return ()

    def check_block(self, config: MemplugConfig, ranks: Ranks) -> None:
        """Called by all ranks that attach. Raises `ConfigError` where the block cannot be used with this framework."""

    def check_attached(self, target: AttachTarget) -> None:
        """Raises `ConflictError` where the session that the model has is not one of this target."""

    def check(self, target: AttachTarget, modules: Layers) -> None:
        """Raises `ConflictError`, `RegionError` or `UnsupportedVersionError` where modules cannot run as regions."""

    def check_states(self, target: AttachTarget) -> None:
        """Raises `ConflictError` where this framework moves optimizer states or parameters by itself."""

    def regathers(self, target: AttachTarget) -> bool:
        """Whether parameters are gathered in every forward (ZeRO 3)."""
        return False

    def layout(self, target: AttachTarget) -> Mapping[str, int]:
        """How the job is split over its ranks, such as {"zero_stage": 2}: a plan is good for no other."""
        return {}

    def prepare(self, target: AttachTarget, name: str) -> Prepare | None:
        """What changes or checks the arguments of a region before each forward; of several frameworks, the first's."""

    def hook(self, target: AttachTarget, modules: Layers, attached: AttachedModel) -> None:
        """Mark steps and micro-batches, and keep out of the regions what is not theirs; `attached.at_detach` undoes it.

        Args:
            modules: of the session's regions, in their order.

        Raises:
            PatchError: a symbol of the framework is missing.
        """
