"""Peak memory of one training step, on CUDA and on the CPU.

CUDA has its own counts: `max_memory_allocated` and `max_memory_reserved` since the last reset.

On the CPU torch keeps no such count, but its allocator reports every malloc and free to the profiler, with address and
size: in forward and in backward, including the scratch memory inside operators. The largest running sum of these sizes
is the peak. It does not include blocks from before the step (parameters, gradients, optimizer state), nor memory that
libraries allocate without torch (scratch memory of matmul kernels). The profiler slows the step down, so a step whose
memory is measured is never timed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Block:
    """One report of the allocator.

    Attributes:
        address: Address of the block.
        nbytes: Size of the block; negative if the block was freed.
        operator: The innermost running operator, or "".
    """

    address: int
    nbytes: int
    operator: str


def cpu_blocks(step: Callable[[], object]) -> list[Block]:
    """Run `step` once under the profiler, and return the reports of the CPU allocator, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    events = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation and event.extra_fields.device.type == "cpu":
            events.append(event)
    events.sort(key=lambda event: event.start_time_ns)
    return [Block(e.extra_fields.ptr, e.extra_fields.alloc_size, e.parent.name if e.parent else "") for e in events]


def live_at_peak(blocks: Iterable[Block], ignored: Collection[tuple[int, int]] = ()) -> list[Block]:
    """Return the blocks that were alive when their sum was first at its largest.

    Args:
        blocks: The result of `cpu_blocks`. A free without its malloc among them does not count.
        ignored: (address, bytes) of blocks to leave out, such as host memory.
    """
    alive: dict[int, Block] = {}
    total = peak = 0
    snapshot: list[Block] = []
    rising = False
    for block in blocks:
        if block.nbytes > 0:
            if (block.address, block.nbytes) in ignored:
                continue
            alive[block.address] = block
            total += block.nbytes
            rising = True
            continue
        if rising and total > peak:
            peak, snapshot = total, list(alive.values())
        rising = False
        freed = alive.pop(block.address, None)
        total -= freed.nbytes if freed else 0
    return list(alive.values()) if total > peak else snapshot


def cpu_peak_bytes(step: Callable[[], object], slabs: Callable[[], Iterable[torch.Tensor]] = tuple) -> int:
    """Return the most bytes that one run of `step` has allocated through torch on the CPU at once.

    Args:
        step: The step to run.
        slabs: Called after the step; returns tensors that stand for host memory, which do not count.
    """
    blocks = cpu_blocks(step)
    ignored = {(slab.data_ptr(), slab.untyped_storage().nbytes()) for slab in slabs()}
    return sum(block.nbytes for block in live_at_peak(blocks, ignored))
