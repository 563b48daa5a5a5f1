"""The texts of `memplug show` about a plan's swap list."""

from __future__ import annotations

from typing import Any

from memplug.show.plan_summary import rows, summary
from memplug.swap.plan.part import SwapPart
from tests.support.memory_plans import MIB, decided_plan, target


def said(part: SwapPart | None) -> tuple[Any, dict[str, str]]:
    """Return the swap list's facts in the plan's summary, and all rows of the summary."""
    plan = decided_plan() if part is None else decided_plan().with_part(part)
    facts = summary(plan)
    return facts["swap_list"], dict(rows(facts))


def test_summary_groups_swapped_bytes_by_the_operator_that_used_them_last():
    targets = [target("aten::mm", 3), target("aten::gelu", 8), target("aten::mm", 2), target("", 1, last_use=-1, key=3)]
    part = SwapPart(
        targets=tuple(targets),
        host_bytes=14 * MIB,
        predicted_peak_bytes=20 * MIB,
        predicted_stall_s=0.25,
        predicted_step_s=2.0,
    )
    facts, words = said(part)
    assert (facts["tensors"], facts["swapped_bytes"], facts["state_bytes"]) == (4, 14 * MIB, MIB)
    assert facts["bytes_by_last_operator"] == {"aten::gelu": 8 * MIB, "aten::mm": 5 * MIB, "": MIB}
    assert words["swap list"] == "4 tensors, 14.00 MiB away between two uses"
    left = "8.00 MiB after aten::gelu, 5.00 MiB after aten::mm, 1.00 MiB after the previous step"
    assert words["  they leave"] == left
    assert words["  waiting"].startswith("250") or words["  waiting"].startswith("0.25")


def test_summary_names_only_the_operators_with_the_most_bytes():
    _, words = said(SwapPart(targets=tuple(target(f"aten::op{mib}", mib) for mib in range(1, 8))))
    assert words["  they leave"].endswith("4.00 MiB after aten::op4, 3 others")


def test_summary_says_why_no_list_exists_and_is_silent_if_the_step_fits():
    facts, words = said(SwapPart(impossible="1 GiB of the device are too little"))
    assert facts["impossible"] and words["swap list"] == "there is none: 1 GiB of the device are too little"
    for part in (None, SwapPart()):
        facts, words = said(part)
        assert facts is None and "swap list" not in words
