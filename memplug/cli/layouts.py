"""Layouts of Megatron-Core on the command line of `memplug estimate`."""

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from memplug.predict.estimator import Estimate
    from memplug.predict.estimator.layout import RankLayout
    from memplug.predict.estimator.workload import Workload


def layout_of(workload: "Workload", split: dict[str, Any], gpus: int | None) -> "RankLayout | None":
    """Return Megatron-Core's layout, or None for an estimate without Megatron-Core.

    `split` has the layout's options on the command line, by the names of `RankLayout`'s fields.
    """
    from memplug.predict.estimator.layout import RankLayout

    if not split and (gpus is not None or not workload.shape.is_mixture):
        return None
    if not workload.head:
        raise typer.BadParameter("Megatron-Core trains only whole models", param_hint="--no-head")
    layout = RankLayout(gpus=gpus or 0, **split)
    layout.check(workload.shape, workload.layers, workload.seq_len)
    return layout


def micro_batches_of(layout: "RankLayout | None", settings: dict[str, Any]) -> int:
    """Return the number of micro-batches in a step of Megatron-Core."""
    given = settings.get("gradient_accumulation_steps")
    return given if isinstance(given, int) or layout is None else layout.micro_batches


def words_of(workload: "Workload", *, optimizer: bool = True, micro_batches: int = 1) -> str:
    """Return the workload in words, to end a line that begins with the description of a rank."""
    several = f"{micro_batches} micro-batches of " if micro_batches > 1 else ""
    parts = [
        f"{workload.layers} layers of {workload.shape.fields['hidden_size']:,}",
        f"{several}{workload.micro_batch} × {workload.seq_len:,} tokens",
        workload.dtype,
        *([f"{workload.routing} routing"] if workload.routing is not None else []),
        *(["head"] if workload.head else []),
        *([f"loss in {workload.loss_tiles} tiles"] if workload.loss_tiles > 1 else []),
        *(["AdamW"] if workload.optimizer and optimizer else []),
    ]
    return ", ".join(parts)


def facts_of(found: "Estimate", workload: "Workload", layout: "RankLayout", micro_batches: int) -> dict[str, Any]:
    """Return the facts of an estimate that are specific to Megatron-Core: title, layout, and pipeline stages."""
    import dataclasses

    several = f"one of {layout.gpus} {found.hardware.name}" if layout.gpus > 1 else f"one {found.hardware.name}"
    rank = ", ".join(filter(None, (several, "Megatron-Core", str(layout))))
    names = ("step_s", "peak_allocated_bytes", "peak_reserved_bytes", "arena_reserved_bytes", "arena_room_bytes")
    return {
        "title": f"Predicted for {rank}: {words_of(workload, micro_batches=micro_batches)}",
        "layout": {**dataclasses.asdict(layout), "data": layout.data, "micro_batches": micro_batches},
        "stages": {
            stage: {mode: {name: getattr(each, name) for name in names} for mode, each in one.items()}
            for stage, one in found.stages.items()
        },
    }
