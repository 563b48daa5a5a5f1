"""Context parallelism: ranks of a group share every sequence, by DeepSpeed's Ulysses for Hugging Face's models.

Each rank has consecutive tokens of a sequence. Around attention the ranks of a group exchange tokens for heads
(https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism).
"""

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel


def share_attention(model: PreTrainedModel, size: int, micro_batch: int) -> Any:
    """Make groups of `size` consecutive ranks that exchange tokens for heads around attention.

    The groups last until the process ends.

    Args:
        model: its attention is "sdpa" or "flash_attention_2".
        size: number of ranks that share a sequence.
        micro_batch: sequences of every micro-batch.

    Returns:
        The groups, as `deepspeed.initialize` takes them (`mpu`); None where each rank has sequences of its own.
    """
    if size == 1:
        return None
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    config = model.config
    # DeepSpeed reads head_dim, which is None in a Mixtral unless its shape has one
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=config._attn_implementation,
        sequence_parallel_size=size,
        micro_batch_size=micro_batch,
    )


def readers(size: int) -> dict[str, int]:
    """Return this rank's place among the readers of data, for `make_batches`.

    All ranks of a group are one reader.
    """
    return {"rank": dist.get_rank() // size, "world_size": dist.get_world_size() // size}


def loss_of(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Run the forward of a micro-batch.

    Args:
        engine: the DeepSpeed engine.
        tokens: whole sequences, int64 [micro_batch, seq_len], the same on every rank of a group.

    Returns:
        This rank's share of the mean loss of the micro-batch's tokens. The shares of a group add up to that mean, and
            DeepSpeed adds up the gradients of a group. (In the tutorial each rank differentiates the sum of all shares,
            so its gradients are too large by the size of the group.)
    """
    size = engine.sequence_parallel_size
    if size == 1:
        return engine(input_ids=tokens, labels=tokens).loss
    part, share = part_of(tokens, engine.mpu.get_sequence_parallel_rank(), size)
    return share * engine(**part).loss


def part_of(tokens: torch.Tensor, rank: int, size: int) -> tuple[dict[str, torch.Tensor], float]:
    """Return one rank's part of sequences, cut as DeepSpeed's `UlyssesSPDataLoaderAdapter` does.

    Args:
        tokens: whole sequences, int64 [micro_batch, seq_len].
        rank: number of the rank within the group.
        size: size of the group; it divides seq_len.

    Returns:
        Arguments of the model's forward, each [micro_batch, seq_len / size], and the rank's share of the micro-batch's
            labels. The last rank has one label less per sequence: a sequence's last token has none.
    """
    labels = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    whole = {"input_ids": tokens, "position_ids": positions, "labels": labels, "shift_labels": labels}
    part = {name: value.chunk(size, dim=1)[rank].contiguous() for name, value in whole.items()}
    own = part["input_ids"].shape[1] - (rank == size - 1)
    return part, own / (tokens.shape[1] - 1)
