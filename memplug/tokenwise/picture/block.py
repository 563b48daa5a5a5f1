"""Puts the "tokenwise" section of a DeepSpeed JSON into words, and warns of settings there that compete with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memplug.block import MemplugConfig, TokenwiseConfig
from memplug.ds_json.keys import offloads_of


def words(tokenwise: TokenwiseConfig, *, served: bool) -> list[str]:
    """Return the section's settings in words, one line each.

    Args:
        tokenwise: the section.
        served: whether an arena serves requests.
    """
    if not tokenwise.enabled:
        return ["  tokenwise is switched off (tokenwise.enabled): regions neither swap nor recompute"]
    regions = "every decoder layer" if tokenwise.regions == "auto" else ", ".join(tokenwise.regions)
    moving = f"{tokenwise.buffers} regions' tensors at a time are in flight; memory to prefetch into is "
    reserved = "planned with the arena" if served else "reserved before the first step under a plan"
    return [
        f"  rows swapped     {_alpha_in_words(tokenwise.alpha)}",
        f"  regions          {regions}",
        f"  smallest swap    tensors of {tokenwise.min_offload_bytes:,} bytes",
        f"  buffers          {moving}{reserved}",
    ]


def warnings(config: MemplugConfig, ds_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each setting of DeepSpeed that conflicts or competes with tokenwise."""
    if not config.tokenwise.enabled:
        return
    if "activation_checkpointing" in ds_config:
        yield (
            '"activation_checkpointing" does nothing unless the script calls deepspeed.checkpointing.configure, and '
            "then memplug refuses to attach: remove both, memplug takes their place"
        )
    offloads = " and ".join(offloads_of(ds_config))
    if offloads:
        budget = config.host_budget_gib
        advice = (
            'set "memplug": {"host_budget_gib": ...} to the memory that it leaves each rank'
            if budget == "auto"
            else f"host_budget_gib, {budget:g} GiB a rank, has to be free as well"
        )
        yield f"DeepSpeed offloads too ({offloads}), and shares host memory and the link with swapping: {advice}"


def _alpha_in_words(alpha: float | str) -> str:
    if alpha == "auto":
        return "chosen per tensor from measured rates and the budgets (alpha auto)"
    if alpha == "memo":
        return "one fraction of each captured tensor, as much as each region's forward hides (alpha memo)"
    if alpha == 0:
        return "none: all of each captured tensor is recomputed (alpha 0)"
    if alpha == 1:
        return "all of each captured tensor, nothing expensive is recomputed (alpha 1)"
    return f"the first {alpha:.4g} of each captured tensor's rows, the rest recomputed (alpha {alpha:.4g})"
