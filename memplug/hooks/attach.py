"""`memplug.attach`: from a target and a configuration to a running session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from memplug.config import MemplugConfig, load_config
from memplug.errors import ConflictError, RegionError, UnsupportedVersionError
from memplug.execute.device import Device
from memplug.hooks import deepspeed as deepspeed_hooks
from memplug.hooks import regions as region_hooks
from memplug.hooks import transformers as transformers_hooks
from memplug.session import Session, device_for, initial_regions

OLDEST_TORCH = (2, 6)


class Disabled(Session):
    """What `attach` returns where the block is absent or says `"enabled": false`: nothing is hooked, patched or allocated."""

    def __init__(self, config: MemplugConfig):
        self.config = config

    def step(self) -> None:
        """Nothing to do."""

    def report(self) -> dict[str, Any]:
        """Says only that memplug is off."""
        return {"stage": "off"}

    def detach(self) -> None:
        """Nothing to undo."""


def attach(target: Any, config: MemplugConfig | dict[str, Any] | str | Path | None = None) -> Session:
    """Run a model's layers token-wise.

    Args:
        target: a DeepSpeed engine, or any `nn.Module` on one device. Hugging Face decoder layers are found by class, other models by the block's
            `tokenwise.regions` (patterns of module names).
        config: the "memplug" block as a dict, the path of a DeepSpeed JSON, or None for the engine's own. A plain module without a config is
            taken as `{"enabled": true}`.

    Returns:
        The session; `step()` marks the end of a training step (a DeepSpeed engine calls it itself), `report()` gives counters, `detach()` undoes everything. Attaching to a
        target again returns the session that it has.

    Raises:
        ConfigError: the block cannot be used.
        RegionError: no decoder layers were found, or a pattern matches nothing.
        ConflictError: another checkpointing is on, or the model is attached to another session.
        UnsupportedVersionError: torch is older than 2.6.
    """
    engine = target if deepspeed_hooks.is_engine(target) else None
    model = engine.module if engine is not None else target
    if not isinstance(model, nn.Module):
        raise RegionError(f"memplug attaches to a DeepSpeed engine or an nn.Module, not to {type(target).__name__}", "Pass the engine or the model.")
    if engine is not None and config is None:
        parsed = deepspeed_hooks.read_block(engine)
    else:
        parsed = load_config({"enabled": True} if config is None else config)
    existing = region_hooks.session_of(model)
    if existing is not None:
        if config is not None and parsed != existing.config:
            raise ConflictError(f"{type(model).__name__} is attached already, with another configuration", "Detach that session first.")
        return existing
    if not parsed.enabled or not parsed.tokenwise.enabled:
        return Disabled(parsed)
    _check_torch()
    return _attach(model, engine, parsed, device_for(_device_of(model, engine)))


def _attach(model: nn.Module, engine: Any, config: MemplugConfig, device: Device) -> Session:
    modules, prepare = _find(model, config)
    for name, module in modules:
        transformers_hooks.check_checkpointing_is_off(name, module)
    if engine is not None:
        deepspeed_hooks.check_checkpointing_is_off()
    regions = initial_regions(config, [(name, type(module).__name__) for name, module in modules])
    session = Session(config, regions, device, regathers=engine is not None and deepspeed_hooks.regathers(engine))
    try:
        for (_, module), region in zip(modules, regions, strict=True):
            session.at_detach(region_hooks.make_region(module, region, session, prepare))
        if engine is not None:
            deepspeed_hooks.hook_engine(engine, session)
    except BaseException:
        session.detach()
        raise
    return session


def _find(model: nn.Module, config: MemplugConfig) -> tuple[list[tuple[str, nn.Module]], Any]:
    patterns = config.tokenwise.regions
    layers = transformers_hooks.decoder_layers(model)
    if patterns == "auto":
        if not layers:
            raise RegionError(f"no decoder layers were recognised in {type(model).__name__}")
        return layers, transformers_hooks.prepare_layer
    found = region_hooks.matching_modules(model, patterns)
    is_layer = {id(layer) for _, layer in layers}
    return found, transformers_hooks.prepare_layer if all(id(module) in is_layer for _, module in found) else None


def _device_of(model: nn.Module, engine: Any) -> torch.device:
    if engine is not None:
        return torch.device(engine.device)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise RegionError(
            f"{type(model).__name__} has parameters on {len(devices)} devices; memplug attaches to a model on one",
            "Move the model to its device before attaching.",
        )
    return devices.pop()


def _check_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise UnsupportedVersionError(f"memplug needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer; {torch.__version__} is installed")
