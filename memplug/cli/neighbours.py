"""What a DeepSpeed JSON means to others than memplug, and they to it: `memplug check` warns of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from memplug.config import MemplugConfig
from memplug.ds_json.keys import offloads_of

_log = logging.getLogger("memplug")


def warn(ds_config: Mapping[str, Any], config: MemplugConfig) -> None:
    """Logs a warning for each setting of DeepSpeed that conflicts or competes with row-cached recompute, and for what
    others who read the file would stumble over.
    """
    if not config.enabled:
        return
    spelt_out = list(_autos(ds_config.get("memplug"), "memplug"))
    if spelt_out:
        _log.warning(
            '"auto" is the default: leave %s out where Trainer, TRL or Accelerate reads this file, which fill in every '
            '"auto" of it and refuse one that they do not know',
            ", ".join(spelt_out),
        )
    if not config.tokenwise.enabled:
        return
    if "activation_checkpointing" in ds_config:
        _log.warning(
            '"activation_checkpointing" does nothing unless the script calls deepspeed.checkpointing.configure, and '
            "then memplug refuses to attach: remove both, memplug takes their place"
        )
    offloads = " and ".join(offloads_of(ds_config))
    if not offloads:
        return
    budget = config.host_budget_gib
    _log.warning(
        "DeepSpeed offloads too (%s), and shares host memory and the link with swapping: %s",
        offloads,
        'set "memplug": {"host_budget_gib": ...} to what it leaves a rank'
        if budget == "auto"
        else f"host_budget_gib, {budget:g} GiB a rank, has to be free beside what it takes",
    )


def _autos(value: object, path: str) -> Iterator[str]:
    """Paths of what is "auto" in a block."""
    if value == "auto":
        yield path
    for key, part in value.items() if isinstance(value, Mapping) else ():
        yield from _autos(part, f"{path}.{key}")
