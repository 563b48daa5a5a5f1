"""What memplug tells: the counters of a report, and events for DeepSpeed's monitor."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memplug.arena.arena import Counters
from memplug.config import MemplugConfig
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.plan.solver import TokenwisePlan

if TYPE_CHECKING:
    from memplug.arena.technique import PlannedAddresses
    from memplug.swap.technique import SwapsWhole
    from memplug.tokenwise.plan.decisions import Decisions
    from memplug.tokenwise.predictions import Predictions
    from memplug.tokenwise.rounding import Rounding


def counters(executor: Executor) -> dict[str, Any]:
    """What the executor did so far and holds now; bytes, counts, why regions are opaque, and which functions are units.

    `unit_functions` are the qualified names of the custom autograd functions whose kernels no operator shows, and which
    a plan can decide on all the same.
    `transfer_allocations` counts how often a copy in got new device memory, `buffer_misses` how often it did although
    rounding buffers were reserved, which take `buffer_bytes` of the device.
    """
    transfer, pool = executor.transfer, executor.pool
    return {
        "forwards": executor.flow.forwards,
        "forwards_in_flight": executor.flow.live,
        "offloaded_bytes": transfer.offloaded_total_bytes,
        "prefetched_bytes": transfer.prefetched_total_bytes,
        "host_used_bytes": pool.used_bytes,
        "host_peak_bytes": pool.peak_bytes,
        "host_pool_bytes": pool.capacity_bytes,
        "host_budget_bytes": pool.budget_bytes,
        "host_refusals": transfer.refused,
        "prefetched_live_bytes": transfer.prefetched_bytes,
        "transfer_allocations": transfer.allocations,
        "buffer_bytes": transfer.buffer_bytes,
        "buffer_misses": transfer.buffer_misses,
        "recomputed_in_full": executor.divergences,
        "opaque_regions": executor.opaque_regions,
        "opaque_because": sorted(executor.opaque),
        "unit_functions": executor.functions.units,
    }


def predicted(decisions: Decisions | None, predictions: Predictions, rounding: Rounding) -> dict[str, Any]:
    """What the plan in force promises, None without one, and whether a step has kept its promise of bytes."""
    solution = decisions.solution if decisions else None
    return {
        "predicted_regions_s": solution.step_s if solution else None,
        "predicted_full_recomputation_s": decisions.full_recomputation_s if decisions else None,
        "predicted_host_bytes": solution.host_bytes if solution else None,
        "expected_step_bytes": predictions.expected_bytes,
        "offloaded_step_bytes": predictions.offloaded_bytes,
        "predicted_kept_bytes": solution.kept_bytes if solution else None,
        "predicted_peak_bytes": rounding.peak_bytes(decisions),
        "bound": solution.bound if solution else None,
    }


def arena(serving: PlannedAddresses | None, why: str) -> dict[str, Any]:
    """What the planned arena did so far, holds now and promises.

    `arena_fallback` counts requests that the native allocator got although a plan was there, `arena_lasting` besides
    those that it got as their blocks outlive the step. `arena_step_served` is the share of the last step's other
    requests that the arena had bytes for, `arena_peak_bytes` the most in use of it since the last plan, in whole
    blocks. `arena_leftover_bytes` are held by blocks of earlier steps that the plan did not know to last;
    `native_bytes` is what the native allocator has in use, None on the CPU.

    Args:
        serving: None: there is no arena, or none yet.
        why: there is none; "": there may be one, once the model trains.
    """
    counters, step, plan = (serving.counters, serving.step, serving.plan) if serving else (Counters(), Counters(), None)
    asked = step.served + step.mismatched + step.dynamic_missed
    reserved = counters.reserved_bytes
    return {
        "arena": serving.state.value if serving else "off" if why else "waiting",
        "arena_off_because": why or None,
        "arena_plans": serving.plans if serving else 0,
        "arena_bytes": reserved,
        "arena_live_bytes": counters.live_bytes,
        "arena_peak_bytes": counters.peak_size,
        "arena_fragmentation": 1 - counters.live_size / reserved if reserved else 0.0,
        "arena_peak_fragmentation": 1 - counters.peak_size / reserved if reserved else 0.0,
        "arena_predicted_fragmentation": plan.predictions.fragmentation if plan else None,
        "arena_served": counters.planned,
        "arena_served_bytes": counters.planned_bytes,
        "arena_dynamic": counters.dynamic,
        "arena_dynamic_bytes": counters.dynamic_bytes,
        "arena_dynamic_missed": counters.dynamic_missed,
        "arena_reusable": counters.reusable,
        "arena_reusable_bytes": counters.reusable_bytes,
        "arena_fallback": counters.fallback,
        "arena_fallback_bytes": counters.native_bytes,
        "arena_lasting": counters.lasting,
        "arena_lasting_bytes": counters.lasting_bytes,
        "arena_leftover_bytes": counters.leftover_bytes,
        "native_bytes": serving.native_bytes if serving else None,
        "arena_step_served": step.served / asked if asked else None,
    }


def swaps(technique: SwapsWhole | None, why: str) -> dict[str, Any]:
    """What the swap list did so far and promises; counts, bytes and seconds.

    `swap_found` and `swap_missed` count its tensors over all steps, `swap_repeated` the steps that were followed by
    their requests alone (memplug/swap/native/repeated_step.h), `swap_cancelled` those that were used again before
    their memory was released, `swap_demanded` those that were used before they were to be back, `swap_passive` those
    that left, for no plan, because a request for memory had failed; `swap_planned_state_bytes` are part of the bytes
    that the list has away in a step, those that leave as it begins; `swap_peak_bytes` is what the second step under the
    list took of the device, as `predicted_swap_peak_bytes` promises, and `swap_stall_s` how long its operators
    waited for copies, beside `predicted_swap_stall_s`; on the CPU, which makes them itself, the time that they took.

    Args:
        technique: None: there is none, or none yet.
        why: there is none; "": there may be one, once the model trains.
    """
    part, counters = (technique.part, technique.counters) if technique else (None, {})
    promises = technique.promises if technique else None
    return {
        "swap": technique.state.value if technique else "off" if why else "waiting",
        "swap_off_because": why or (part.impossible if part else "") or None,
        "swap_tensors": len(part.targets) if part else 0,
        "swap_planned_bytes": part.swapped_bytes if part else 0,
        "swap_planned_state_bytes": part.state_bytes if part else 0,
        "swap_peak_bytes": promises.peak_bytes if promises else None,
        "predicted_swap_peak_bytes": part.predicted_peak_bytes if part else None,
        "swap_stall_s": promises.stall_s if promises else None,
        "predicted_swap_stall_s": part.predicted_stall_s if part else None,
        **{
            f"swap_{name}": counters.get(name, 0)
            for name in (
                *("found", "missed", "repeated", "released_bytes", "prefetched_bytes"),
                *("cancelled", "demanded", "refused", "passive", "passive_bytes"),
            )
        },
    }


def swapped_fraction(config: MemplugConfig, solution: TokenwisePlan | None, regions: Sequence[Region]) -> float | None:
    """Of the rows of every matmul's output, the mean of all regions; None before there is a plan."""
    if config.tokenwise.fixed_alpha is not None:
        return config.tokenwise.fixed_alpha
    return statistics.fmean(region.setting.rows for region in regions) if solution and regions else None


def monitor_events(report: dict[str, Any], samples: int) -> list[tuple[str, float, int]]:
    """Events for `engine.monitor.write_events`: every number of a report, as `Train/memplug/...`, at `samples`."""
    numbers = {
        key: value for key, value in report.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return [(f"Train/memplug/{key}", float(value), samples) for key, value in numbers.items()]
