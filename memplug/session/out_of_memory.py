"""The note and the allocator snapshot that memplug adds when the device runs out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from memplug.device.device import Device
from memplug.session.recording import of_rank
from memplug.session.report import Report
from memplug.torch_private import dump_snapshot

SNAPSHOT_FOLDER = "memplug_snapshots"
BEGINS = "memplug: out of memory"


def note(
    phase: str,
    region: str | None,
    report: Report,
    peak_bytes: int | None,
    asked_gib: float | Literal["auto"] = "auto",
    is_bound: bool = False,
) -> str:
    """Return the note for an out-of-memory error: the state of each technique, and three things to change.

    Args:
        phase: "forward", "recompute", "backward" or "step".
        region: qualified name of the module; None outside regions.
        report: the session's report.
        peak_bytes: most bytes allocated on the device so far; None if the device does not count them.
        asked_gib: "device_budget_gib" of the block.
        is_bound: True if the device has no memory beyond `asked_gib`: the CPU stands in for a device of that size.
    """
    advice = filter(
        None, ['add host memory ("host_budget_gib")', *(each.advice for each in report.techniques.values())]
    )
    lines = [
        f"memplug: out of memory in {phase}" + (f" of region {region}" if region else ""),
        *(f"  {line}" for each in report.techniques.values() for line in each.explain(peak_bytes)),
        f"  stage {report.stage}, after {report.steps:,} steps",
        "  Three things to change, the cheapest first:",
        f"    1. {_of_budget(asked_gib, is_bound)}",
        f"    2. {', or '.join(advice)}",
        "    3. halve the micro-batch or the sequence; raise gradient accumulation or the ZeRO stage instead",
    ]
    return "\n".join(lines)


def is_told(error: BaseException) -> bool:
    """Return whether an exception has memplug's note already, from `add_note` or from the native core's message."""
    return getattr(error, "_memplug_note", False) or BEGINS in str(error)


def add_note(error: BaseException, text: str) -> None:
    """Attach a note to an exception; on Python 3.10, append it to the message."""
    error._memplug_note = True
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.args = (f"{error.args[0] if error.args else ''}\n{text}", *error.args[1:])


def save_snapshot(asked: bool | str, device: Device, step: int) -> str:
    """Save a snapshot of torch's allocator for pytorch.org/memory_viz, if the block asks for one.

    Args:
        asked: `report.snapshot_on_oom` of the block: whether to save, or the folder to write to.
        device: the device that ran out of memory.
        step: number of the step, for the file's name.

    Returns:
        An additional line for the note; "" if no snapshot was asked for.
    """
    if not asked:
        return ""
    if device.kind != "cuda":
        return "\n  no snapshot: the CPU's allocator keeps none"
    file = of_rank(Path(SNAPSHOT_FOLDER if asked is True else asked) / f"step{step:06}.pickle")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        dump_snapshot(str(file))
    except (OSError, RuntimeError) as error:
        return f"\n  no snapshot: {error}"
    return f"\n  a snapshot of the allocator is in {file}: drop it on https://pytorch.org/memory_viz"


def _of_budget(asked_gib: float | Literal["auto"], is_bound: bool) -> str:
    if asked_gib == "auto":
        return 'set "device_budget_gib" below the memory of the device, so that the plan keeps less there'
    if is_bound:
        return f'raise "device_budget_gib", which is {asked_gib:g}: on the CPU a step may use no more than that'
    return f'lower "device_budget_gib", which is {asked_gib:g}, so that the plan keeps less on the device'
