"""ProTrain's estimators (appendices A and B.1): time and device memory of a ZeRO 3 step with offload.

Parameters are divided into chunks, numbered in forward order. The first `persistent` chunks stay on the device, sharded
over the ranks; the other chunks are on the host. The last `buffered` chunks are still gathered on the device when
backward begins. A block is a decoder layer. It keeps, swaps or recomputes ("checkpoints") the activations that it
saves.

All functions are pure. Times are in seconds, sizes in bytes. Sequences have one entry per chunk in forward order, or
per operator in the order of backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkTimes:
    """The times of one chunk, in seconds.

    Attributes:
        forward_s: Forward computation with the chunk's parameters.
        backward_s: Backward computation with the chunk's parameters.
        recompute_s: The second forward of the chunk's blocks that checkpoint.
        gather_s: Gathering the chunk's parameters from all ranks.
        upload_s: Copying this rank's shard of the parameters from the host; 0 for a persistent chunk.
        reduce_s: Reducing the chunk's gradients over all ranks.
        offload_s: Copying this rank's shard of the gradients to the host; 0 for a persistent chunk.
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
    """How many chunks stay on the device, and how many stay gathered.

    Attributes:
        persistent: The number of chunks, from the first, that stay on the device.
        buffered: The number of chunks, from the last, that stay gathered from forward to backward.
    """

    persistent: int
    buffered: int


def step_s(chunks: Sequence[ChunkTimes], placement: Placement, gpu_optimizer_s: float, cpu_optimizer_s: float) -> float:
    """Return the time of a whole step (Equation 2).

    The CPU updates the chunks on the host while backward runs. The device updates persistent chunks afterwards.

    Args:
        chunks: The chunks' times.
        placement: How many chunks stay on the device, and how many stay gathered.
        gpu_optimizer_s: Seconds that the update of persistent chunks takes.
        cpu_optimizer_s: Seconds that the update of all other chunks takes.

    Returns:
        Seconds.
    """
    return forward_s(chunks, placement) + max(backward_s(chunks, placement) + gpu_optimizer_s, cpu_optimizer_s)


def forward_s(chunks: Sequence[ChunkTimes], placement: Placement) -> float:
    """Return the time of the forward (Equation 3).

    While one chunk computes, the next chunk is prefetched.

    Args:
        chunks: The chunks' times.
        placement: How many chunks stay on the device, and how many stay gathered.

    Returns:
        Seconds.
    """
    computed = [0.0, *(chunk.forward_s for chunk in chunks)]
    return sum(max(computed[i - 1], forward_prefetch_s(chunks, placement, i)) for i in range(1, len(chunks) + 2))


def forward_prefetch_s(chunks: Sequence[ChunkTimes], placement: Placement, i: int) -> float:
    """Return the time to prefetch chunk `i` before its forward (Equation 4).

    Args:
        chunks: The chunks' times.
        placement: How many chunks stay on the device, and how many stay gathered.
        i: The chunk, from 1.

    Returns:
        Seconds; 0 beyond the last chunk.
    """
    if i > len(chunks):
        return 0.0
    chunk = chunks[i - 1]
    return chunk.gather_s if i <= placement.persistent else chunk.gather_s + chunk.upload_s


def backward_s(chunks: Sequence[ChunkTimes], placement: Placement) -> float:
    """Return the time of the backward, from the last chunk to the first (Equation 5).

    While chunk i computes, chunk i - 1 is prefetched and the gradients of chunk i + 1 are reduced. As in the paper,
    reducing the gradients of chunk 1 counts no time, although no computation hides it.

    Args:
        chunks: The chunks' times.
        placement: How many chunks stay on the device, and how many stay gathered.

    Returns:
        Seconds.
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
    """Return the time to reduce and offload the gradients of chunk `i` (Equation 6).

    Args:
        chunks: The chunks' times.
        placement: How many chunks stay on the device, and how many stay gathered.
        i: The chunk, from 1.

    Returns:
        Seconds; 0 beyond the last chunk.
    """
    if i > len(chunks):
        return 0.0
    chunk = chunks[i - 1]
    return chunk.reduce_s if i <= placement.persistent else chunk.reduce_s + chunk.offload_s


def backward_prefetch_s(chunks: Sequence[ChunkTimes], placement: Placement, i: int) -> float:
    """Return the time to prefetch chunk `i` before its backward (Equation 7).

    Args:
        chunks: The chunks' times.
        placement: How many chunks stay on the device, and how many stay gathered.
        i: The chunk, from 1.

    Returns:
        Seconds; 0 before the first chunk, and for a persistent or buffered chunk.
    """
    if i <= placement.persistent or i > len(chunks) - placement.buffered:
        return 0.0
    return chunks[i - 1].gather_s + chunks[i - 1].upload_s


# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorMemory:
    """The effect of one backward operator on the device memory in use, as a profiler measures it, in bytes.

    Attributes:
        before_bytes: Net change from the end of the previous operator to the start of this one.
        before_peak_bytes: Largest increase within that interval.
        during_bytes: Net change while this operator runs.
        during_peak_bytes: Largest increase while this operator runs.
        activation_bytes: Activations saved in forward for this operator; they are freed when it ends.
    """

    before_bytes: int = 0
    before_peak_bytes: int = 0
    during_bytes: int = 0
    during_peak_bytes: int = 0
    activation_bytes: int = 0


def base_peak_bytes(after_forward_bytes: int, operators: Sequence[OperatorMemory]) -> int:
    """Return the peak memory of the backward if all saved activations stay on the device (Equations 8 and 9).

    Args:
        after_forward_bytes: Device memory in use when the forward ends, without saved activations.
        operators: Operators of the backward, in order.
    """
    current = peak = after_forward_bytes + sum(operator.activation_bytes for operator in operators)
    for operator in operators:
        begins = current + operator.before_bytes
        peak = max(peak, current + operator.before_peak_bytes, begins + operator.during_peak_bytes)
        current = begins + operator.during_bytes - operator.activation_bytes
    return peak


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUnits:
    """The device memory that one chunk or one block adds or saves, in bytes.

    Attributes:
        persistent: Size of a persistent chunk with its optimizer states.
        buffer: Size of a buffer for one gathered chunk.
        swapped: Device memory that a block saves by swapping.
        checkpointed: Device memory that a block saves by checkpointing.
    """

    persistent: int
    buffer: int
    swapped: int
    checkpointed: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks swap and checkpoint; the other blocks keep their activations.

    Attributes:
        count: The number of all blocks.
        swap: The number of blocks that swap.
        checkpoint: The number of blocks that checkpoint.
    """

    count: int
    swap: int = 0
    checkpoint: int = 0


def peak_bytes(base_bytes: int, units: MemoryUnits, placement: Placement, blocks: BlockCounts) -> int:
    """Return the peak device memory of a step, without fragmentation (Equation 10).

    If every block swaps or checkpoints, one block is recomputing at the peak, so that block's activations are added.

    Args:
        base_bytes: The peak with all activations and no chunk on the device, from `base_peak_bytes`.
        units: Memory of one chunk and of one block.
        placement: How many chunks stay on the device, and how many stay gathered.
        blocks: How many blocks swap and checkpoint.
    """
    peak = base_bytes + units.persistent * placement.persistent + units.buffer * placement.buffered
    peak -= units.swapped * blocks.swap + units.checkpointed * blocks.checkpoint
    return peak + (units.checkpointed if blocks.swap + blocks.checkpoint == blocks.count else 0)


# -- chunks ------------------------------------------------------------------------------------------------------------


def chunks_of(block_bytes: Sequence[int], chunk_bytes: int) -> list[int]:
    """Fill chunks with blocks in forward order, without cutting a block.

    Args:
        block_bytes: Bytes of each block's parameters.
        chunk_bytes: The size of a chunk.

    Returns:
        Bytes of parameters in each chunk.

    Raises:
        ValueError: A block is larger than a chunk.
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
    """Return the total of unused bytes in all chunks.

    Args:
        block_bytes: Bytes of each block's parameters.
        chunk_bytes: The size of a chunk.

    Raises:
        ValueError: A block is larger than a chunk.
    """
    filled = chunks_of(block_bytes, chunk_bytes)
    return len(filled) * chunk_bytes - sum(filled)


def chunk_size(block_bytes: Sequence[int], sizes: Iterable[int]) -> int:
    """Return the chunk size that wastes the fewest bytes (appendix B.1).

    Of several sizes that waste equally few bytes, return the smallest.

    Args:
        block_bytes: Bytes of each block's parameters, in forward order; shared parameters count only in the first
            block.
        sizes: The sizes to choose from.

    Raises:
        ValueError: No size holds the largest block.
    """
    holding = sorted(size for size in sizes if size >= max(block_bytes, default=0))
    if not holding:
        raise ValueError(f"no chunk size holds a block of {max(block_bytes):,} bytes")
    return min(holding, key=lambda nbytes: wasted_bytes(block_bytes, nbytes))
