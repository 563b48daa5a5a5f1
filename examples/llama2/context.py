"""Context parallelism: ranks of a group share every sequence, by DeepSpeed's Ulysses for Hugging Face's models.

Each rank has consecutive tokens of a sequence; around attention the ranks of a group exchange tokens for heads
(https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism).
"""

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel


def share_attention(model: PreTrainedModel, size: int, micro_batch: int) -> Any:
    """Makes groups of `size` consecutive ranks, and attention exchange heads within them, for the rest of the process.

    Args:
        model: its attention is "sdpa" or "flash_attention_2".
        size: ranks that share a sequence.
        micro_batch: sequences of every micro-batch.

    Returns:
        The groups, as `deepspeed.initialize` wants them (`mpu`); None where each rank has sequences of its own.
    """
    if size == 1:
        return None
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    config = model.config
    # DeepSpeed reads it, and a Mixtral's is None unless its shape has one
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=config._attn_implementation,
        sequence_parallel_size=size,
        micro_batch_size=micro_batch,
    )


def readers(size: int) -> dict[str, int]:
    """Returns this rank's place among the readers of data, for `make_batches`: all ranks of a group are one of them."""
    return {"rank": dist.get_rank() // size, "world_size": dist.get_world_size() // size}


def loss_of(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Runs the forward of a micro-batch.

    Args:
        engine: the DeepSpeed engine.
        tokens: whole sequences, int64 [micro_batch, seq_len], the same on every rank of a group.

    Returns:
        This rank's share of the mean loss of the micro-batch's tokens: the shares of a group add up to it. DeepSpeed
        adds up the gradients of a group; those of the tutorial's loss, the sum, which each rank of a group
        differentiates with respect to all shares, come out too large by the size of the group.
    """
    size = engine.sequence_parallel_size
    if size == 1:
        return engine(input_ids=tokens, labels=tokens).loss
    part, share = part_of(tokens, engine.mpu.get_sequence_parallel_rank(), size)
    return share * engine(**part).loss


def part_of(tokens: torch.Tensor, rank: int, size: int) -> tuple[dict[str, torch.Tensor], float]:
    """Returns one rank's part of sequences, cut as by DeepSpeed's `UlyssesSPDataLoaderAdapter`.

    Args:
        tokens: whole sequences, int64 [micro_batch, seq_len].
        rank: within the group.
        size: of the group; it divides seq_len.

    Returns:
        Arguments of the model's forward, each [micro_batch, seq_len / size], and which share of the micro-batch's
        labels the rank has: the last token of a sequence, which the last rank has, has no label.
    """
    labels = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    whole = {"input_ids": tokens, "position_ids": positions, "labels": labels, "shift_labels": labels}
    part = {name: value.chunk(size, dim=1)[rank].contiguous() for name, value in whole.items()}
    own = part["input_ids"].shape[1] - (rank == size - 1)
    return part, own / (tokens.shape[1] - 1)
