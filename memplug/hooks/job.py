"""What a training job is: the model, its layers, the block, where it runs and how it is split over ranks."""

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

from memplug.config import MemplugConfig
from memplug.packages import FRAMEWORKS
from memplug.profile.records import Fingerprint

OF_NO_CONSEQUENCE = {"plan_dir": True, "report": True, "profiler": {"wait_for_plans"}}  # of the block


def job_of(
    root: nn.Module,
    model: nn.Module,
    layers: Sequence[tuple[str, nn.Module]],
    device: torch.device,
    config: MemplugConfig | None = None,
    layout: Mapping[str, int] | None = None,
) -> Fingerprint:
    """The fingerprint of all steps, without their inputs.

    Args:
        root: what is called.
        model: all of it.
        layout: see `Framework.layout`.
    """
    named = ";".join(f"{name}:{type(module).__name__}" for name, module in layers)
    distributed = dist.is_initialized()
    is_cpu = device.type == "cpu"
    block = None if config is None else config.model_dump(mode="json", exclude=OF_NO_CONSEQUENCE)
    return Fingerprint(
        model=type(root).__name__,
        # ZeRO 3 leaves empty tensors, which say how many elements they had
        parameters=sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
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
    """Of the installed packages; they stay as they are while a process runs, and reading them takes milliseconds."""
    versions = []
    for package in sorted(("memplug", "torch", *(each.name for each in FRAMEWORKS))):
        with contextlib.suppress(metadata.PackageNotFoundError):
            version, _, _ = metadata.version(package).partition("+")  # "+cpu", "+cu130": builds of one program
            versions.append((package, version))
    return tuple(versions)
