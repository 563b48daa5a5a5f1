"""`memplug.attach`: from a target and a configuration to a running session."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memplug.config import MemplugConfig, load_config
from memplug.errors import ConflictError, RecorderError, RegionError, UnsupportedVersionError
from memplug.execute.device import Device, device_of
from memplug.hooks import deepspeed as deepspeed_hooks
from memplug.hooks import regions as region_hooks
from memplug.hooks import transformers as transformers_hooks
from memplug.hooks.places import Places
from memplug.profile.recorder import Recorder
from memplug.recording import Recording
from memplug.session import Session, Stage, initial_regions

log = logging.getLogger("memplug")

OLDEST_TORCH = (2, 6)


class Disabled(Session):
    """What `attach` returns where the block is absent or switched off: nothing is hooked, patched or allocated."""

    stage = Stage.OFF
    history: list[Any] = []
    solution = trace = None

    def __init__(self, config: MemplugConfig):
        self.config = config

    def step(self) -> None:
        """Nothing to do."""

    def record(self, file: str | Path | None = None) -> None:
        """Raises `RecorderError`: a session that is off records nothing."""
        raise RecorderError("memplug is off, so no step is recorded", 'Set "memplug": {"enabled": true}.')

    def report(self) -> dict[str, Any]:
        """Says only that memplug is off."""
        return {"stage": self.stage.value}

    def detach(self) -> None:
        """Nothing to undo."""


def attach(target: Any, config: MemplugConfig | dict[str, Any] | str | Path | None = None) -> Session:
    """Run a model's layers token-wise, and its training from a planned arena.

    Args:
        target: a DeepSpeed engine, or any `nn.Module` on one device. Hugging Face decoder layers are found by class,
            other models by the block's `tokenwise.regions` (patterns of module names).
        config: the "memplug" block as a dict, the path of a DeepSpeed JSON, or None for the engine's own. A plain
            module without a config is taken as `{"enabled": true}`.

    Returns:
        The session; `step()` marks the end of a training step (a DeepSpeed engine calls it itself), `report()` gives
        counters, `detach()` undoes everything. Attaching to a target again returns the session that it has.

    Raises:
        ConfigError: the block cannot be used.
        RegionError: no decoder layers were found, a pattern matches nothing, or the model is not on one device.
        ConflictError: another checkpointing is on, or the model is attached to another session.
        UnsupportedVersionError: torch is older than 2.6.
    """
    engine = target if deepspeed_hooks.is_engine(target) else None
    model = engine.module if engine is not None else target
    if not isinstance(model, nn.Module):
        raise RegionError(
            f"memplug attaches to a DeepSpeed engine or an nn.Module, not to {type(target).__name__}",
            "Pass the engine or the model.",
        )
    if engine is not None and config is None:
        parsed = deepspeed_hooks.read_block(engine)
    else:
        parsed = load_config({"enabled": True} if config is None else config)
    existing = region_hooks.session_of(model)
    if existing is not None:
        if config is not None and parsed != existing.config:
            raise ConflictError(
                f"{type(model).__name__} is attached already, with another configuration", "Detach that session first."
            )
        if engine is not None and not deepspeed_hooks.is_hooked(engine):
            raise ConflictError(
                "the engine's model was attached by itself, so that the session does not see the engine's steps",
                "Detach that session and attach to the engine, or leave it to `memplug.install()`.",
            )
        return existing
    if not parsed.active:
        if engine is not None and config is None and not deepspeed_hooks.has_block(engine):
            log.warning('memplug: off: the engine\'s configuration has no "memplug" block; pass {"enabled": true}')
        return Disabled(parsed)
    _check_torch()
    return _attach(model, engine, parsed, device_of(_device_of(model, engine)))


def _attach(model: nn.Module, engine: Any, config: MemplugConfig, device: Device) -> Session:
    found = _find(model, config)
    modules = found if config.tokenwise.enabled else []
    layers = [transformers_hooks.layers_around(model, name) for name, _ in modules]
    for around in layers:
        transformers_hooks.check_checkpointing_is_off(around)
    if engine is not None and config.tokenwise.enabled:
        deepspeed_hooks.check_checkpointing_is_off()
    regions = initial_regions(config, [(name, type(module).__name__) for name, module in modules])
    session = Session(config, regions, device, regathers=engine is not None and deepspeed_hooks.regathers(engine))
    try:
        if not modules:
            session.at_detach(region_hooks.mark(model, session))
        for (_, module), region, around in zip(modules, regions, layers, strict=True):
            prepare = functools.partial(transformers_hooks.arguments, around)
            session.at_detach(region_hooks.make_region(module, region, session, prepare))
        if engine is not None:
            deepspeed_hooks.hook_engine(engine, session)
        session.watch(functools.partial(_make_recording, model, found, device))
    except BaseException:
        session.detach()
        raise
    return session


def _make_recording(model: nn.Module, layers: Sequence[tuple[str, nn.Module]], device: Device) -> Recording:
    recorder = Recorder(device.torch_device)
    return Recording(recorder, Places(model, layers, recorder))


def _find(model: nn.Module, config: MemplugConfig) -> list[tuple[str, nn.Module]]:
    patterns = config.tokenwise.regions
    if patterns != "auto":
        return region_hooks.matching_modules(model, patterns)
    layers = transformers_hooks.decoder_layers(model)
    if not layers and config.tokenwise.enabled:
        raise RegionError(f"no decoder layers were recognised in {type(model).__name__}")
    return layers


def _device_of(model: nn.Module, engine: Any) -> torch.device:
    if engine is not None:
        return torch.device(engine.device)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise RegionError(
            f"{type(model).__name__} has parameters on {len(devices)} devices; memplug attaches to a model on one",
            "Move the model to its device before attaching.",
        )
    device = devices.pop()
    if device.type not in ("cuda", "cpu"):
        raise RegionError(
            f"{type(model).__name__} is on the {device.type} device; memplug runs on cuda and cpu",
            "Move the model to its device before attaching.",
        )
    return device


def _check_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise UnsupportedVersionError(
            f"memplug needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer; {torch.__version__} is installed"
        )
