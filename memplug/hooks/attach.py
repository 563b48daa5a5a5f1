"""Defines `memplug.attach`, which attaches to a model or engine and returns a session."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memplug import torch_private
from memplug.config import MemplugConfig, load_config
from memplug.device.device import KINDS, Device, device_of
from memplug.errors import ConflictError, RegionError
from memplug.hooks import (
    checkpointing,
    first_forward,
    flex_attention,
    frameworks,
    groups,
    optimizers,
    transformer_engine,
    units,
)
from memplug.hooks import regions as region_hooks
from memplug.hooks.framework import AttachTarget
from memplug.hooks.groups import Group
from memplug.hooks.job import job_of
from memplug.hooks.layers import find_layers
from memplug.hooks.places import Places
from memplug.profile.recorder import Recorder
from memplug.session.attached import AttachedModel
from memplug.session.ranks import Ranks
from memplug.session.recording import Recording
from memplug.session.session import Disabled, Session
from memplug.session.table import Stage
from memplug.tokenwise.engine.core import core
from memplug.tokenwise.engine.region import Region


def attach(
    target: Any, config: MemplugConfig | dict[str, Any] | str | Path | None = None, *, group: Group | None = None
) -> Session:
    """Swap and recompute a model's layers token-wise, and serve its training from a planned arena.

    In a distributed run, call it on all ranks that train the model. A rank that waits longer than 30 s logs a warning.

    Args:
        target: a DeepSpeed engine, a Megatron-Core model or the list of its chunks, or any `nn.Module`. All parameters
            must be on one device. memplug finds the layers of Hugging Face and Megatron-Core by class, and in other
            models the modules that repeat. To name other layers, give patterns of module names in the block's
            `tokenwise.regions`.
        config: the "memplug" block as a dict, or the path of a DeepSpeed JSON. By default, the block of the engine's
            configuration; for a model without an engine, `{"enabled": true}`.
        group: the ranks that train the model, as a process group or a list. By default, the process group of the
            DeepSpeed engine, DistributedDataParallel, FSDP or a device mesh; without such a group, all ranks.

    Returns:
        The session. `step()` marks the end of a training step (a DeepSpeed engine calls it itself), `report()` returns
        counters, `detach()` undoes everything. A second call for the same target returns the existing session.

    Raises:
        ConfigError: the block is invalid, or not the same on all ranks of a Megatron-Core model.
        RegionError: a pattern matches nothing on any rank, the chunks belong to several models, or the model is on
            several devices or on one that memplug does not support.
        ConflictError: other activation checkpointing is on, or the model is attached to another session.
        RanksError: this rank is not in the group, or another rank of the group did not attach within the time limit of
            `init_process_group`.
        UnsupportedVersionError: torch is too old or lacks a feature that memplug uses, or Megatron-Core is older than
            0.16.
    """
    target = _target_of(target)
    used = frameworks.frameworks_in(target)
    own = filter(None, (framework.block(target) for framework in used if config is None))
    parsed = next(own, None) or load_config({"enabled": True} if config is None else config)
    existing = region_hooks.attached_to(target.model)
    if existing is not None:
        if config is not None and parsed != existing.config:
            name = type(target.chunks[0]).__name__
            raise ConflictError(f"{name} is attached already, with another configuration", "Detach that session first.")
        for framework in used:
            framework.check_attached(target)
        return existing.session
    found = [one for framework in used for one in framework.groups(target)]
    ranks = Ranks(groups.members_of(target, group, found))
    try:
        session = _begin(target, parsed, ranks)
    except BaseException:
        ranks.close()
        raise
    if session.stage is Stage.OFF:
        for framework in used if config is None else ():
            framework.explain_off(target)
    return session


def _begin(target: AttachTarget, config: MemplugConfig, ranks: Ranks) -> Session:
    for framework in frameworks.frameworks_in(target):
        framework.check_block(config, ranks)
    if not config.active:
        ranks.close()
        return Disabled(config)
    torch_private.check()
    return _attach(target, config, device_of(target.device or _device_of(target)), ranks)


def _tensors_of(model: weakref.ref[nn.Module]) -> Iterator[torch.Tensor]:
    """Return the parameters and buffers of a model; nothing if the model no longer exists."""
    alive = model()
    return iter(()) if alive is None else itertools.chain(alive.parameters(), alive.buffers())


def _target_of(given: Any) -> AttachTarget:
    if isinstance(given, (list, tuple)) and len(given) == 1:
        given = given[0]
    claimed = next(filter(None, (framework.claim(given) for framework in frameworks.FRAMEWORKS)), None)
    if claimed is None and not isinstance(given, nn.Module):
        raise RegionError(
            "memplug attaches to a DeepSpeed engine, an nn.Module or a list of Megatron-Core model chunks, not to "
            f"{type(given).__name__}",
            "Pass the engine or the model.",
        )
    return claimed or AttachTarget(given, (given,))


def _attach(target: AttachTarget, config: MemplugConfig, device: Device, ranks: Ranks) -> Session:
    used = frameworks.frameworks_in(target)
    found, has_layers = find_layers(target.model, config, ranks)
    modules = found if config.tokenwise.enabled else []
    for framework in used if modules else ():
        framework.check(target, modules, config)
    for framework in used if config.swap.enabled and config.swap.states else ():
        framework.check_states(target)
    regions = [Region(name, type(module).__name__) for name, module in modules]
    regathers = any(framework.regathers(target) for framework in used)
    attached = AttachedModel(config, regions, device, regathers, ranks, has_regions=has_layers)
    try:
        if modules:
            torch_private.check_compiler(core().AsWritten)
        else:
            attached.at_detach(region_hooks.mark(target.chunks[0], attached))
        for (name, module), region in zip(modules, regions, strict=True):
            prepare = next(filter(None, (framework.prepare(target, name, config) for framework in used)), None)
            attached.at_detach(region_hooks.make_region(module, region, attached, prepare))
        optimizers.watch(target.chunks, attached)
        groups.watch_joins(attached)
        for framework in used:
            framework.hook(target, modules, attached)
        transformer_engine.hook([module for _, module in modules], attached)
        if modules:
            checkpointing.take_over(modules, target.model, attached)
            flex_attention.hook(attached)
            units.watch_functions(attached.executor.functions, attached)
        layout = dict(pair for framework in used for pair in framework.layout(target).items())
        job = job_of(target.chunks[0], target.model, found, device.torch_device, config, layout)

        def make_recording() -> Recording:
            recorder = Recorder(device.torch_device)
            return Recording(recorder, Places(target.model, found, recorder, target.chunks, job))

        attached.boundary.watch(make_recording, functools.partial(_tensors_of, weakref.ref(target.model)))
        if attached.boundary.resume(job) or attached.agreed.plans:
            first_forward.watch(target.chunks, attached)
    except BaseException:
        attached.detach()
        raise
    return Session(attached)


def _device_of(target: AttachTarget) -> torch.device:
    name = type(target.chunks[0]).__name__
    devices = {parameter.device for parameter in target.model.parameters()}
    if len(devices) != 1:
        raise RegionError(
            f"{name} has parameters on {len(devices)} devices; memplug attaches to a model on one",
            "Move the model to its device before attaching.",
        )
    device = devices.pop()
    if device.type not in KINDS:
        raise RegionError(
            f"{name} is on the {device.type} device; memplug runs on cuda and cpu",
            "Move the model to its device before attaching.",
        )
    return device
