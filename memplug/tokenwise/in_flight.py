"""Finds the times of a step at which swapped tensors are in flight, and how much room the device has then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memplug.profile.trace import Pass, Trace
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.plan.solver import InFlight


def times(step: Trace, regions: Sequence[Region], buffers: int) -> tuple[InFlight, ...]:
    """Return the times at which a step may have its peak under a plan that swaps more than the safest setting.

    There are two such times:

    * Until the last region's forward is over, tensors of `buffers` regions are in flight.
    * After that, while no region runs, tensors of one region are in flight. Before backward it is the last region,
      which offloads late (only if its memory is needed). In backward it is the region that is prefetched next.

    While a region's backward runs, the executor limits prefetching (`Flow::limit_bytes`). If no region offloads late,
    as with several graphs in flight, the time of the peak is unknown. Then the result is a single time, at which no
    bytes are free for tensors in flight.

    Args:
        step: a step recorded in detail, at the safest setting.
        regions: the regions that the step ran.
        buffers: see `Executor`.
    """
    live_bytes = step.live_bytes
    if not live_bytes.size or not any(region.native.offloads_late for region in regions):
        return (InFlight(buffers),)
    inside = [i for i, layer in enumerate(step.layers) if any(_is_of(layer.name, region.name) for region in regions)]
    backwards = [i for i, phase in enumerate(step.phases) if phase.kind in (Pass.BACKWARD, Pass.PREFETCH)]
    of_regions = np.isin(step.events["layer"], inside)
    in_backward = of_regions & np.isin(step.events["phase"], backwards)
    forwards_follow = np.logical_or.accumulate((of_regions & ~in_backward)[::-1])[::-1]

    def at(count: int, events: np.ndarray) -> InFlight:
        return InFlight(count, max(0, int(live_bytes.max() - live_bytes[events].max(initial=step.base_bytes))))

    return at(buffers, forwards_follow & ~in_backward), at(1, ~forwards_follow & ~of_regions)


def _is_of(layer: str, region: str) -> bool:
    """Return whether a layer is the region, or inside of it."""
    return layer == region or layer.startswith(f"{region}.")
