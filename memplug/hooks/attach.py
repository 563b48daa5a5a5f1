"""`memplug.attach`: from a target and a configuration to a running session."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memplug.config import MemplugConfig, load_config
from memplug.errors import ConflictError, RecorderError, RegionError, UnsupportedVersionError
from memplug.execute.device import Device, device_of
from memplug.hooks import deepspeed as deepspeed_hooks
from memplug.hooks import megatron as megatron_hooks
from memplug.hooks import regions as region_hooks
from memplug.hooks import transformers as transformers_hooks
from memplug.hooks.forwards import Forwards
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
    """Run a model's layers token-wise, and its training from a planned arena. In a distributed run, all ranks attach.

    Args:
        target: a DeepSpeed engine, a Megatron-Core model or the list of its chunks, or any `nn.Module`; on one device.
            Hugging Face's and Megatron-Core's layers are found by class, those of other models by the block's
            `tokenwise.regions` (patterns of module names).
        config: the "memplug" block as a dict, the path of a DeepSpeed JSON, or None for the engine's own. Without one,
            a model that has no engine is taken as `{"enabled": true}`.

    Returns:
        The session; `step()` marks the end of a training step (a DeepSpeed engine calls it itself), `report()` gives
        counters, `detach()` undoes everything. Attaching to a target again returns the session that it has.

    Raises:
        ConfigError: the block cannot be used, or is not the same on all ranks of a Megatron-Core model.
        RegionError: no decoder layers were found, a pattern matches nothing, the chunks are not those of one model, or
            the model is not on one device.
        ConflictError: another checkpointing is on, or the model is attached to another session.
        UnsupportedVersionError: torch is older than 2.6, or Megatron-Core older than 0.16.
    """
    target = _target_of(target)
    if target.engine is not None and config is None:
        parsed = deepspeed_hooks.read_block(target.engine)
    else:
        parsed = load_config({"enabled": True} if config is None else config)
    if target.is_megatron:
        megatron_hooks.check_ranks_agree(parsed)
    existing = region_hooks.session_of(target.model)
    if existing is not None:
        _check_same(target, existing, parsed if config is not None else None)
        return existing
    if not parsed.active:
        if target.engine is not None and config is None and not deepspeed_hooks.has_block(target.engine):
            log.warning('memplug: off: the engine\'s configuration has no "memplug" block; pass {"enabled": true}')
        return Disabled(parsed)
    _check_torch()
    return _attach(target, parsed, device_of(_device_of(target)))


@dataclass(frozen=True, slots=True)
class _Target:
    """What `attach` was given: the model, the parts of it that are called, and what drives them."""

    model: nn.Module
    chunks: tuple[nn.Module, ...]
    engine: Any

    @property
    def is_megatron(self) -> bool:
        return bool(megatron_hooks.decoder_layers(self.model))


def _target_of(target: Any) -> _Target:
    engine = target if deepspeed_hooks.is_engine(target) else None
    if isinstance(target, (list, tuple)) and len(target) == 1:
        target = target[0]
    if isinstance(target, (list, tuple)) and target and all(isinstance(part, nn.Module) for part in target):
        megatron_hooks.check_chunks(target)
        return _Target(nn.ModuleList(target), tuple(target), None)
    model = engine.module if engine is not None else target
    if not isinstance(model, nn.Module):
        raise RegionError(
            "memplug attaches to a DeepSpeed engine, an nn.Module or a list of Megatron-Core model chunks, not to "
            f"{type(target).__name__}",
            "Pass the engine or the model.",
        )
    return _Target(model, (model,), engine)


def _check_same(target: _Target, existing: Session, config: MemplugConfig | None) -> None:
    name = type(target.chunks[0]).__name__
    if config is not None and config != existing.config:
        raise ConflictError(f"{name} is attached already, with another configuration", "Detach that session first.")
    if target.engine is not None and not deepspeed_hooks.is_hooked(target.engine):
        raise ConflictError(
            "the engine's model was attached by itself, so that the session does not see the engine's steps",
            "Detach that session and attach to the engine, or leave it to `memplug.install()`.",
        )


def _attach(target: _Target, config: MemplugConfig, device: Device) -> Session:
    model, engine = target.model, target.engine
    found = _find(model, config)
    modules = found if config.tokenwise.enabled else []
    layers = [transformers_hooks.layers_around(model, name) for name, _ in modules]
    for around in layers:
        transformers_hooks.check_checkpointing_is_off(around)
    if engine is not None and config.tokenwise.enabled:
        deepspeed_hooks.check_checkpointing_is_off()
    if modules and target.is_megatron:
        megatron_hooks.check(megatron_hooks.decoder_layers(model))
    regions = initial_regions(config, [(name, type(module).__name__) for name, module in modules])
    session = Session(config, regions, device, regathers=engine is not None and deepspeed_hooks.regathers(engine))
    try:
        if not modules:
            session.at_detach(region_hooks.mark(target.chunks[0], session))
        for (_, module), region, around in zip(modules, regions, layers, strict=True):
            of_transformers = functools.partial(transformers_hooks.arguments, around)
            prepare = megatron_hooks.arguments if target.is_megatron else of_transformers
            session.at_detach(region_hooks.make_region(module, region, session, prepare))
        Forwards(target.chunks, session)
        if engine is not None:
            deepspeed_hooks.hook_engine(engine, session, modules)
        if target.is_megatron:
            megatron_hooks.hook([module for _, module in modules], session)
        session.watch(functools.partial(_make_recording, target, found, device))
    except BaseException:
        session.detach()
        raise
    return session


def _make_recording(target: _Target, layers: Sequence[tuple[str, nn.Module]], device: Device) -> Recording:
    recorder = Recorder(device.torch_device)
    return Recording(recorder, Places(target.model, layers, recorder, target.chunks))


def _find(model: nn.Module, config: MemplugConfig) -> list[tuple[str, nn.Module]]:
    patterns = config.tokenwise.regions
    if patterns != "auto":
        return region_hooks.matching_modules(model, patterns)
    layers = transformers_hooks.decoder_layers(model) or megatron_hooks.decoder_layers(model)
    if not layers and config.tokenwise.enabled:
        raise RegionError(f"no decoder layers were recognised in {type(model).__name__}")
    return layers


def _device_of(target: _Target) -> torch.device:
    if target.engine is not None:
        return torch.device(target.engine.device)
    name = type(target.chunks[0]).__name__
    devices = {parameter.device for parameter in target.model.parameters()}
    if len(devices) != 1:
        raise RegionError(
            f"{name} has parameters on {len(devices)} devices; memplug attaches to a model on one",
            "Move the model to its device before attaching.",
        )
    device = devices.pop()
    if device.type not in ("cuda", "cpu"):
        raise RegionError(
            f"{name} is on the {device.type} device; memplug runs on cuda and cpu",
            "Move the model to its device before attaching.",
        )
    return device


def _check_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise UnsupportedVersionError(
            f"memplug needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer; {torch.__version__} is installed"
        )
