"""The output of `memplug estimate`: a table and files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplug.cli import layouts

if TYPE_CHECKING:
    from memplug.predict.estimator import Estimate
    from memplug.predict.estimator.workload import Workload


def facts_of(
    found: "Estimate",
    workload: "Workload",
    largest: dict[str, dict[str, int]],
    settings: dict[str, Any],
    gpus: int | None,
) -> dict[str, Any]:
    """Return the estimate as plain values: seconds, bytes, and shares.

    Args:
        found: The estimate.
        workload: The estimated workload.
        largest: The longest sequence and the largest micro-batch that fit, by mode; empty if unknown.
        settings: The DeepSpeed JSON.
        gpus: Number of ranks of DeepSpeed's engine; None: the estimate is without it.
    """
    names = ("step_s", "flops", "peak_allocated_bytes", "peak_reserved_bytes", "arena_reserved_bytes")
    arena = ("arena_bytes", "arena_room_bytes")
    more = ("arena_off_because", "host_bytes", "to_host_bytes", "to_device_bytes", "bound", "fits", "bubble_s")
    hardware = found.hardware
    rank = f"one {hardware.name}"
    if gpus is not None:
        stage = (settings.get("zero_optimization") or {}).get("stage")
        rank = f"one of {gpus} {hardware.name}, ZeRO {stage if isinstance(stage, int) else 0}"
    return {
        "title": f"Predicted for {rank}: {layouts.words_of(workload, optimizer=gpus is None)}",
        "gpu": hardware.name,
        "device_bytes": int(hardware.memory_bytes),
        "modes": {
            mode: {
                **{name: getattr(each, name) for name in (*names, *arena, *more)},
                "over_keep": found.over_keep(mode),
                "model_flops_utilization": found.utilization(mode, hardware.peak_flops),
                **largest.get(mode, {}),
            }
            for mode, each in found.items()
        },
        "impossible": {mode: {"least_gib": error.least_gib} for mode, error in found.impossible.items()},
    }


def table_of(facts: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headers and rows of a table with one column for each mode."""
    from memplug.words import duration, known, size

    def share(value: float | None) -> str:
        return known(value, lambda each: f"{100 * each:.1f} %")

    rows = [
        ("step", lambda each: duration(each["step_s"])),
        ("over keep", lambda each: known(each["over_keep"], lambda ratio: f"{ratio:.3f}")),
        ("model FLOP/s utilization", lambda each: share(each["model_flops_utilization"])),
        ("peak allocated", lambda each: size(each["peak_allocated_bytes"])),
        ("reserved by torch", lambda each: size(each["peak_reserved_bytes"])),
        ("reserved with the arena", lambda each: known(each["arena_reserved_bytes"], size)),
        ("host memory", lambda each: size(each["host_bytes"])),
        ("to host, to device", lambda each: f"{size(each['to_host_bytes'])}, {size(each['to_device_bytes'])}"),
        ("waits for", lambda each: each["bound"]),
        (f"fits {size(facts['device_bytes'])}", lambda each: "yes" if each["fits"] else "no"),
        ("longest sequence", lambda each: f"{each['longest_seq_len']:,}"),
        ("largest micro-batch", lambda each: f"{each['largest_micro_batch']:,}"),
    ]
    modes = list(facts["modes"])
    if facts.get("stages"):
        rows.insert(1, ("pipeline bubble in it", lambda each: duration(each["bubble_s"])))
    if any(each["arena_room_bytes"] for each in facts["modes"].values()):
        at = [name for name, _ in rows].index("reserved with the arena")
        rows.insert(at + 1, ("  room for experts in it", lambda each: size(each["arena_room_bytes"])))
    if not all("longest_seq_len" in each for each in facts["modes"].values()):
        rows = rows[:-2]
    return ["", *modes], [[name, *(words(facts["modes"][mode]) for mode in modes)] for name, words in rows]


def unknown_of(facts: dict[str, Any]) -> list[str]:
    """Return a line for each mode whose arena size is unknown, with the reason."""
    return [
        f"{mode}: reserved with the arena unknown: {each['arena_off_because']}"
        for mode, each in facts["modes"].items()
        if each["arena_reserved_bytes"] is None and each["arena_off_because"]
    ]


def write(
    found: "Estimate",
    workload: "Workload",
    facts: dict[str, Any],
    html: Path | None,
    chrome: Path | None,
    as_json: Path | None,
) -> None:
    """Write the requested files: the steps' charts as a page and as a Chrome trace, and the facts as JSON.

    Args:
        found: The estimate.
        workload: The estimated workload.
        facts: The result of `facts_of`.
        html: File for the page; None: not requested.
        chrome: File for the Chrome trace; None: not requested.
        as_json: File for the JSON; None: not requested.

    Raises:
        MemplugError: plotly is missing, or a file cannot be written.
    """
    import json

    from memplug.errors import MemplugError
    from memplug.show.gantt import gantt, write_chrome
    from memplug.show.page import write_page

    steps = {mode: (each.step_s, each.spans) for mode, each in found.items()}
    try:
        if html is not None and steps:
            write_page(gantt(facts["title"], steps), html)
        if chrome is not None:
            write_chrome(steps, chrome)
        if as_json is not None:
            as_json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise MemplugError(f"{error.filename}: {error.strerror}", "Name a file that can be written.") from None
