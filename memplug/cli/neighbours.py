"""Warnings of `memplug check`: values that other readers of the JSON refuse, and settings that conflict."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from memplug.config import MemplugConfig
from memplug.show.techniques import pictures

_log = logging.getLogger("memplug")


def warn(ds_config: Mapping[str, Any], config: MemplugConfig) -> None:
    """Log one warning for all values that other readers of the file refuse, and one for each conflicting setting.

    Args:
        ds_config: The whole DeepSpeed JSON.
        config: The "memplug" block of the JSON.
    """
    if not config.enabled:
        return
    spelt_out = list(_autos(ds_config.get("memplug"), "memplug"))
    if spelt_out:
        _log.warning(
            '"auto" is the default: leave %s out if Trainer, TRL or Accelerate reads this file, since they fill in '
            'every "auto" and refuse those that they do not know',
            ", ".join(spelt_out),
        )
    for each in pictures().values():
        for warning in each.block_warnings(config, ds_config):
            _log.warning("%s", warning)


def _autos(value: object, path: str) -> Iterator[str]:
    """Yield the paths of all "auto" values in a block."""
    if value == "auto":
        yield path
    for key, part in value.items() if isinstance(value, Mapping) else ():
        yield from _autos(part, f"{path}.{key}")
