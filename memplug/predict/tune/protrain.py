"""ProTrain's estimators (appendices A and B.1): time and device memory of a step of ZeRO 3 with offload.

Parameters lie in chunks, numbered in the order of the forward: the first `persistent` ones stay on the device, sharded
over its ranks; the others are on the host, and the last `buffered` of them are still there, gathered, when backward
begins. Layers of a transformer are its blocks: each keeps, swaps or recomputes ("checkpoints") what it saves.

Pure functions. Times are in seconds, sizes in bytes; sequences have an entry for each chunk, or operator, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkTimes:
    """Of one chunk, in seconds.

    Attributes:
        forward_s, backward_s: computing what the chunk's parameters are for.
        recompute_s: the forward of its blocks that checkpoint, once more.
        gather_s: its parameters from all ranks.
        upload_s: this rank's shard of them from the host; a persistent chunk needs none.
        reduce_s: its gradients over all ranks.
        offload_s: this rank's shard of them to the host; likewise.
    """

    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    gather_s: float = 0.0
    upload_s: float = 0.0
    reduce_s: float = 0.0
    offload_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where chunks are.

    Attributes:
        persistent: how many stay on the device, the first ones.
        buffered: how many, the last ones, are there from forward to backward.
    """

    persistent: int
    buffered: int


def step_s(chunks: Sequence[ChunkTimes], placement: Placement, gpu_optimizer_s: float, cpu_optimizer_s: float) -> float:
    """Of a whole step (Equation 2): the host updates its chunks while backward runs, the device its own ones after.

    Args:
        gpu_optimizer_s: of persistent chunks.
        cpu_optimizer_s: of all others.
    """
    return forward_s(chunks, placement) + max(backward_s(chunks, placement) + gpu_optimizer_s, cpu_optimizer_s)


def forward_s(chunks: Sequence[ChunkTimes], placement: Placement) -> float:
    """Of the forward (Equation 3): while a chunk computes, the next one is prefetched."""
    computed = [0.0, *(chunk.forward_s for chunk in chunks)]
    return sum(max(computed[i - 1], forward_prefetch_s(chunks, placement, i)) for i in range(1, len(chunks) + 2))


def forward_prefetch_s(chunks: Sequence[ChunkTimes], placement: Placement, i: int) -> float:
    """Of chunk `i`, from 1, before its forward (Equation 4); beyond the last one 0."""
    if i > len(chunks):
        return 0.0
    chunk = chunks[i - 1]
    return chunk.gather_s if i <= placement.persistent else chunk.gather_s + chunk.upload_s


def backward_s(chunks: Sequence[ChunkTimes], placement: Placement) -> float:
    """Of the backward, from the last chunk to the first (Equation 5): while one computes, the one before it is
    prefetched, and the gradients of the one behind it are reduced. As in the paper the first one's gradients, which
    nothing hides, take no time.
    """
    count = len(chunks)
    computed = [*(chunk.backward_s + chunk.recompute_s for chunk in chunks), 0.0]
    return sum(
        max(
            computed[i - 1],
            backward_prefetch_s(chunks, placement, i - 1),
            reduce_offload_s(chunks, placement, i + 1),
        )
        for i in range(1, count + 2)
    )


def reduce_offload_s(chunks: Sequence[ChunkTimes], placement: Placement, i: int) -> float:
    """Of chunk `i`'s gradients, from 1 (Equation 6); beyond the last one 0."""
    if i > len(chunks):
        return 0.0
    chunk = chunks[i - 1]
    return chunk.reduce_s if i <= placement.persistent else chunk.reduce_s + chunk.offload_s


def backward_prefetch_s(chunks: Sequence[ChunkTimes], placement: Placement, i: int) -> float:
    """Of chunk `i`, from 1, before its backward (Equation 7): none where it is persistent or buffered; before the first
    one 0.
    """
    if i <= placement.persistent or i > len(chunks) - placement.buffered:
        return 0.0
    return chunks[i - 1].gather_s + chunks[i - 1].upload_s


# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorMemory:
    """What an operator of the backward does to the memory in use, in bytes, as a profiler saw it.

    Attributes:
        before_bytes, before_peak_bytes: change between the operator before and this one: at its end, and at most.
        during_bytes, during_peak_bytes: change while it runs, likewise.
        activation_bytes: that its forward saved, and that are free once it has run.
    """

    before_bytes: int = 0
    before_peak_bytes: int = 0
    during_bytes: int = 0
    during_peak_bytes: int = 0
    activation_bytes: int = 0


def base_peak_bytes(after_forward_bytes: int, operators: Sequence[OperatorMemory]) -> int:
    """The most memory in use in backward, with all that is saved on the device (Equations 8 and 9).

    Args:
        after_forward_bytes: in use as the forward ends, without what operators have saved.
        operators: of the backward, in order.
    """
    current = peak = after_forward_bytes + sum(operator.activation_bytes for operator in operators)
    for operator in operators:
        begins = current + operator.before_bytes
        peak = max(peak, current + operator.before_peak_bytes, begins + operator.during_peak_bytes)
        current = begins + operator.during_bytes - operator.activation_bytes
    return peak


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUnits:
    """Bytes of one of each.

    Attributes:
        persistent, buffer: of a chunk that stays on the device, with its states, and of a buffer for a gathered one.
        swapped, checkpointed: that a block which swaps, or checkpoints, does not have on the device.
    """

    persistent: int
    buffer: int
    swapped: int
    checkpointed: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many blocks there are, and of these how many swap and how many checkpoint; the others keep all they save."""

    count: int
    swap: int = 0
    checkpoint: int = 0


def peak_bytes(base_bytes: int, units: MemoryUnits, placement: Placement, blocks: Blocks) -> int:
    """The most device memory in use in a step (Equation 10), without fragments.

    Where every block swaps or checkpoints, one recomputes where the peak is: what it makes is there again.

    Args:
        base_bytes: with all that is saved on the device, and no chunk: see `base_peak_bytes`.
    """
    peak = base_bytes + units.persistent * placement.persistent + units.buffer * placement.buffered
    peak -= units.swapped * blocks.swap + units.checkpointed * blocks.checkpoint
    return peak + (units.checkpointed if blocks.swap + blocks.checkpoint == blocks.count else 0)


# -- chunks ------------------------------------------------------------------------------------------------------------


def chunks_of(block_bytes: Sequence[int], chunk_bytes: int) -> list[int]:
    """How many bytes of parameters each chunk of that size has: blocks in the order of the forward, none of them cut.

    Raises:
        ValueError: a block is larger than that.
    """
    filled: list[int] = []
    for nbytes in block_bytes:
        if nbytes > chunk_bytes:
            raise ValueError(f"a block of {nbytes:,} bytes does not fit into a chunk of {chunk_bytes:,}")
        if filled and filled[-1] + nbytes <= chunk_bytes:
            filled[-1] += nbytes
        else:
            filled.append(nbytes)
    return filled


def wasted_bytes(block_bytes: Sequence[int], chunk_bytes: int) -> int:
    """What chunks of that size have and no parameter is in; raises as `chunks_of`."""
    filled = chunks_of(block_bytes, chunk_bytes)
    return len(filled) * chunk_bytes - sum(filled)


def chunk_size(block_bytes: Sequence[int], sizes: Iterable[int]) -> int:
    """The size that wastes the least (appendix B.1), of equal ones the smallest.

    Args:
        block_bytes: of each block's parameters, in the order of the forward; one that two blocks share counts to the
            first.
        sizes: to choose from.

    Raises:
        ValueError: none of them holds the largest block.
    """
    holding = sorted(size for size in sizes if size >= max(block_bytes, default=0))
    if not holding:
        raise ValueError(f"no chunk size holds a block of {max(block_bytes):,} bytes")
    return min(holding, key=lambda nbytes: wasted_bytes(block_bytes, nbytes))
