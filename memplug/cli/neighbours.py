"""What a DeepSpeed JSON means to others than memplug, and they to it: `memplug check` warns of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from memplug.config import MemplugConfig
from memplug.show.techniques import pictures

_log = logging.getLogger("memplug")


def warn(ds_config: Mapping[str, Any], config: MemplugConfig) -> None:
    """Logs a warning for what others who read the file would stumble over, and for each setting of DeepSpeed that
    conflicts or competes with a technique.
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
    for each in pictures().values():
        for warning in each.block_warnings(config, ds_config):
            _log.warning("%s", warning)


def _autos(value: object, path: str) -> Iterator[str]:
    """Paths of what is "auto" in a block."""
    if value == "auto":
        yield path
    for key, part in value.items() if isinstance(value, Mapping) else ():
        yield from _autos(part, f"{path}.{key}")
