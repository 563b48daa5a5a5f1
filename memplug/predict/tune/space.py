"""The search space: one box of configurations for each layout that the DeepSpeed JSON and the command line allow."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memplug.predict.tune.deepspeed import buffered_within
from memplug.predict.tune.estimate import chunks_of
from memplug.predict.tune.fixed import Fixed, all_layouts, micro_batches
from memplug.predict.tune.machine import Machine
from memplug.predict.tune.profiled import ModelProfile
from memplug.predict.tune.search import Box, Offload, StepLayout
from memplug.sizes import GIB

FIXED = "fixed by the DeepSpeed JSON or the command line"
NOT_HIDDEN = "copies of blocks that swap would take longer than the forward"


@dataclass(frozen=True)
class Space:
    """The configurations to search, and the number of configurations ruled out before the search.

    Attributes:
        boxes: Boxes of configurations to search.
        ruled_out: The number of configurations outside of all boxes, by reason.
    """

    boxes: tuple[Box, ...]
    ruled_out: Counter[str] = field(default_factory=Counter)


def space_of(fixed: Fixed, machine: Machine, profiles: Mapping[int, ModelProfile]) -> Space:
    """Build the search space.

    Args:
        fixed: The values that the DeepSpeed JSON and the command line fix.
        machine: The machine to tune for.
        profiles: The model's profiles by micro-batch.

    Raises:
        TuneError: The training batch is not divisible by the fixed sizes and GPUs, or fixed values contradict each
            other.
    """
    ruled_out: Counter[str] = Counter()
    boxes = []
    for micro_batch, accumulation in fixed.batches(machine.gpus):
        profile = profiles[micro_batch]
        for stage, offload in fixed.layouts():
            layout = StepLayout(stage=stage, offload=offload, micro_batch=micro_batch, accumulation=accumulation)
            every = _narrowed(free_box(layout, profile), fixed, profile)
            hidden = replace(every, n_swap=range(min(every.n_swap.stop, most_swaps(machine, profile) + 1)))
            ruled_out[NOT_HIDDEN] += len(every) - len(hidden)
            boxes.append(hidden)
    if fixed != Fixed():
        searched = sum(map(len, boxes)) + ruled_out[NOT_HIDDEN]
        ruled_out[FIXED] = max(0, _size_of_all(next(iter(profiles.values()))) - searched)
    return Space(tuple(boxes), +ruled_out)


def free_box(layout: StepLayout, profile: ModelProfile) -> Box:
    """Return all configurations of a layout.

    Only ZeRO 3 gathers chunks. Only ZeRO 3 can keep a part of the optimizer's states on the host; with ZeRO 1 and 2
    either all states are on the host or none.

    Args:
        layout: The layout.
        profile: The model's profile.
    """
    chunks, blocks = len(chunks_of(profile)), profile.layers
    persist = range(chunks, chunks + 1)
    if layout.offload != "none":
        persist = range(chunks) if layout.stage == 3 else range(1)
    return Box(
        layout=layout,
        blocks=blocks,
        n_persist=persist,
        n_buffer=range(chunks + 1) if layout.stage == 3 else range(chunks, chunks + 1),
        n_swap=range(blocks + 1),
        n_checkpoint=range(blocks + 1),
    )


def most_swaps(machine: Machine, profile: ModelProfile) -> int:
    """Return the number of blocks whose swapped bytes can be copied to the host during the forward of all blocks.

    ProTrain swaps at most this many blocks.

    Args:
        machine: The machine to tune for.
        profile: The model's profile.
    """
    copy_s = machine.offload_s(profile.swapped_bytes)
    return min(profile.layers, int(profile.layers * profile.layer.forward_s / copy_s))


def _narrowed(box: Box, fixed: Fixed, profile: ModelProfile) -> Box:
    """Return the sub-box that agrees with the fixed values."""
    counts = [chunk.count for chunk in chunks_of(profile)]
    if fixed.ratio is not None and box.layout.stage == 3 and box.layout.offload != "none":
        persist = min(int((1 - fixed.ratio) * len(counts) + 1e-9), len(counts) - 1)
        box = replace(box, n_persist=range(persist, persist + 1))
    if fixed.max_reuse_distance is not None and box.layout.stage == 3:
        buffered = buffered_within(counts, fixed.max_reuse_distance)
        box = replace(box, n_buffer=range(buffered, buffered + 1))
    swaps = profile.layers if fixed.swaps else 0
    if fixed.swapped_gib is not None:
        swaps = min(swaps, int(fixed.swapped_gib * GIB / profile.swapped_bytes))
    return replace(
        box,
        n_swap=range(swaps + 1),
        n_checkpoint=box.n_checkpoint if fixed.checkpoints else range(1),
    )


def _size_of_all(profile: ModelProfile) -> int:
    """Return the number of configurations of a search in which nothing is fixed.

    The number is the same for each micro-batch, so it is computed for one.
    """

    def size(stage: int, offload: Offload) -> int:
        return len(free_box(StepLayout(stage=stage, offload=offload, micro_batch=1, accumulation=1), profile))

    return len(micro_batches()) * sum(itertools.starmap(size, all_layouts()))
