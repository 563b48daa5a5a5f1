"""The report of tokenwise, and its plan in one line."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from memplug.session.technique_report import TechniqueReport
from memplug.tokenwise.checking import AlphaCheck
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.plan.decisions import Decisions
from memplug.tokenwise.plan.model import TokenwisePlan
from memplug.tokenwise.plan.plain import is_plain
from memplug.tokenwise.predictions import Predictions
from memplug.words import known, size


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenwiseReport(TechniqueReport):
    """Counts since the session began, memory held now, and the predictions of the plan in force (None without one).

    Attributes:
        regions: modules that run token-wise.
        plain_regions: the regions among them that run as without memplug, since the device has room.
        alpha: the block's alpha: a fraction of rows to swap, or "auto" or "memo".
        alpha_by_link: the largest fraction whose copies the link hides behind each region's forward; None until a
            number above 0 for alpha is checked.
        alpha_by_host: the largest fraction that the host budget holds, likewise.
        swapped_fraction: swapped fraction of the rows of every matmul's output, mean of all regions; None before there
            is a plan.
        swapped_share: share of the rows to be swapped that are still swapped; below 1 once a rank's host memory ran
            out.
        predicted_regions_s: seconds that all regions take in a step.
        predicted_full_recomputation_s: seconds that they would take recomputed in full, with nothing swapped.
        predicted_host_bytes: host memory that a step needs.
        expected_step_bytes: bytes that the plan says a step offloads; None before a step was compared.
        offloaded_step_bytes: bytes offloaded in the step that was compared: the second one under the latest plan, or
            the first one after it that is as large as the one that the plan was made from.
        predicted_kept_bytes: bytes that the plan keeps on the device.
        predicted_peak_bytes: largest allocation total of the device in a step, with the rounding buffers reserved now.
        bound: the limit that keeps the plan from being faster.
        forwards: forwards of regions with gradients.
        forwards_in_flight: the forwards among them whose backward is not over.
        offloaded_bytes: bytes copied to the host.
        prefetched_bytes: bytes copied back to the device.
        host_used_bytes: pinned host memory in use now.
        host_peak_bytes: the most pinned host memory in use so far.
        host_pool_bytes: host memory that is pinned now.
        host_budget_bytes: host memory that may be pinned.
        host_refusals: copies to the host that found no room there.
        prefetched_live_bytes: device memory that prefetched rows hold now.
        transfer_allocations: copies to the device for which new device memory was allocated.
        buffer_bytes: device memory of rounding buffers.
        buffer_misses: copies to the device for which new memory was allocated although rounding buffers were reserved.
        recomputed_in_full: forwards whose backward ran the whole region again, because its operators had changed.
        opaque_regions: regions that run their module again in backward.
        opaque_because: the reasons for that.
        unit_functions: qualified names of custom autograd functions whose kernels no operator shows and that a plan can
            nevertheless decide on.
    """

    advice: ClassVar[str] = 'set "tokenwise": {"alpha": 0}: recomputation needs the least'

    regions: int = 0
    plain_regions: int = 0
    alpha: float | str | None = None
    alpha_by_link: float | None = None
    alpha_by_host: float | None = None
    swapped_fraction: float | None = None
    swapped_share: float = 1.0
    predicted_regions_s: float | None = None
    predicted_full_recomputation_s: float | None = None
    predicted_host_bytes: int | None = None
    expected_step_bytes: int | None = None
    offloaded_step_bytes: int | None = None
    predicted_kept_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    bound: str | None = None
    forwards: int = 0
    forwards_in_flight: int = 0
    offloaded_bytes: int = 0
    prefetched_bytes: int = 0
    host_used_bytes: int = 0
    host_peak_bytes: int = 0
    host_pool_bytes: int = 0
    host_budget_bytes: int = 0
    host_refusals: int = 0
    prefetched_live_bytes: int = 0
    transfer_allocations: int = 0
    buffer_bytes: int = 0
    buffer_misses: int = 0
    recomputed_in_full: int = 0
    opaque_regions: int = 0
    opaque_because: Sequence[str] = ()
    unit_functions: Sequence[str] = ()

    def explain(self, peak_bytes: int | None) -> tuple[str, ...]:
        """Return lines on the step's peak, and on the memory that memplug holds on the device and the host."""
        return (
            f"peak: predicted {known(self.predicted_peak_bytes, size)}, measured {known(peak_bytes, size)} (allocated "
            "in all)",
            f"memplug holds on the device: {size(self.prefetched_live_bytes)} prefetched, "
            f"{known(self.predicted_kept_bytes, size)} kept by plan, {size(self.buffer_bytes)} in rounding buffers",
            f"memplug holds on the host: {size(self.host_used_bytes)} of {size(self.host_budget_bytes)}",
            f"alpha {self.alpha}, {self.forwards_in_flight} region forwards in flight",
        )

    def closing(self) -> str:
        """Return, for the last logged line, the swapped bytes and the time that the plan saves."""
        return "; ".join(filter(None, [f"{size(self.offloaded_bytes)} swapped" if self.regions else "", self._saved()]))

    def _saved(self) -> str:
        full_s, regions_s = self.predicted_full_recomputation_s, self.predicted_regions_s
        if not full_s or not self.forwards:
            return ""
        saved = f"{full_s - regions_s:.3f} s a step: its regions would take {full_s:.3f} s recomputed in full"
        return f"by its own estimate the plan saves {saved}"


def report_of(
    alpha: float | str,
    regions: Sequence[Region],
    executor: Executor,
    decisions: Decisions | None,
    check: AlphaCheck,
    predictions: Predictions,
    predicted_peak_bytes: int | None,
) -> TokenwiseReport:
    """Return the report of tokenwise.

    Args:
        alpha: the block's alpha.
        regions: all regions of the session.
        executor: the executor of the regions.
        decisions: the decisions in force.
        check: the check of a number for alpha.
        predictions: the comparison of steps with their plan.
        predicted_peak_bytes: see `TokenwiseReport`.
    """
    return TokenwiseReport(
        regions=len(regions),
        plain_regions=sum(region.is_plain for region in regions),
        alpha=alpha,
        alpha_by_link=check.by_link,
        alpha_by_host=check.by_host,
        swapped_fraction=_swapped_fraction(alpha, decisions, regions),
        expected_step_bytes=predictions.expected_bytes,
        offloaded_step_bytes=predictions.offloaded_bytes,
        predicted_peak_bytes=predicted_peak_bytes,
        **_promised(decisions),
        **_counted(executor),
    )


def _promised(decisions: Decisions | None) -> dict[str, Any]:
    if decisions is None:
        return {}
    solution = decisions.solution
    return {
        "predicted_regions_s": solution.step_s,
        "predicted_full_recomputation_s": decisions.full_recomputation_s,
        "predicted_host_bytes": solution.host_bytes,
        "predicted_kept_bytes": solution.kept_bytes,
        "bound": solution.bound,
    }


def _counted(executor: Executor) -> dict[str, Any]:
    transfer, pool = executor.transfer, executor.pool
    return {
        "swapped_share": executor.flow.share,
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


def _swapped_fraction(alpha: float | str, decisions: Decisions | None, regions: Sequence[Region]) -> float | None:
    if not isinstance(alpha, str):
        return alpha
    return statistics.fmean(region.setting.rows for region in regions) if decisions and regions else None


def plan_in_words(solution: TokenwisePlan) -> str:
    """Return a plan in one line."""
    if is_plain(solution):
        return f"planned: the device has room for {size(solution.kept_bytes)} more: regions run as without memplug"
    swapped = sum(region.swapped_bytes for region in solution.regions.values())
    recompute_s = sum(region.recompute_s for region in solution.regions.values())
    bound = solution.bound if solution.alpha is None else f"{solution.bound}, at alpha {solution.alpha:.3f}"
    return (
        f"planned: {size(swapped)} of outputs swapped and {size(solution.kept_bytes)} kept a step, "
        f"{recompute_s:.3f} s recomputed, {size(solution.host_bytes)} of host memory, bound by {bound}"
    )
