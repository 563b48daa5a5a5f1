"""Makes the fingerprint of a training job, from its model, layers, block, device, packages and split over ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from memplug.config import MemplugConfig
from memplug.packages import FRAMEWORKS
from memplug.profile.records import Fingerprint

OF_NO_CONSEQUENCE = {"plan_dir": True, "report": True, "profiler": {"wait_for_plans"}}  # fields that change no plan


def job_of(
    root: nn.Module,
    model: nn.Module,
    layers: Sequence[tuple[str, nn.Module]],
    device: torch.device,
    config: MemplugConfig | None = None,
    layout: Mapping[str, int] | None = None,
) -> Fingerprint:
    """Return the fingerprint of a job, without the inputs of its steps.

    Args:
        root: the module that the training loop calls.
        model: the whole model.
        layers: names and modules of the layers.
        device: the device that trains.
        config: the block, or None.
        layout: the job's split over ranks; see `Framework.layout`.
    """
    named = ";".join(f"{name}:{type(module).__name__}" for name, module in layers)
    distributed = dist.is_initialized()
    is_cpu = device.type == "cpu"
    block = None if config is None else config.model_dump(mode="json", exclude=OF_NO_CONSEQUENCE)
    return Fingerprint(
        model=type(root).__name__,
        # under ZeRO 3 a parameter is an empty tensor, whose `ds_numel` is the original number of elements
        parameters=sum(0 if is_lazy(p) else getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
        layers=_digest(named),
        rank=dist.get_rank() if distributed else 0,
        world_size=dist.get_world_size() if distributed else 1,
        device=f"cpu: {platform.machine()}" if is_cpu else torch.get_device_module(device).get_device_name(device),
        versions=_versions(),
        layout=tuple(sorted((layout or {}).items())),
        block="" if block is None else _digest(json.dumps(block, sort_keys=True)),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of the installed packages; cached, since reading them takes milliseconds."""
    versions = []
    for package in sorted(("memplug", "torch", *(each.name for each in FRAMEWORKS))):
        with contextlib.suppress(metadata.PackageNotFoundError):
            version, _, _ = metadata.version(package).partition("+")  # "+cpu" and "+cu130" are builds of one version
            versions.append((package, version))
    return tuple(versions)
