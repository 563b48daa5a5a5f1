"""The order of the data: the train/validation split, and batches that depend only on their index."""

import functools
import math
from dataclasses import dataclass

import torch

VALIDATION_FRACTION = 0.05


def tokens_wanted(batch_tokens: int) -> int:
    """Return how many tokens a text needs for its validation part to hold one micro-batch of all ranks."""
    return math.ceil(batch_tokens / VALIDATION_FRACTION)


def split(tokens: torch.Tensor, batch_tokens: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the stream in two: one part to train on, the rest to validate with.

    Args:
        tokens: [tokens].
        batch_tokens: tokens of one micro-batch of all ranks together. The validation part is the last 5 %, but at least
            this many tokens.
    """
    cut = len(tokens) - max(int(len(tokens) * VALIDATION_FRACTION), batch_tokens)
    return tokens[: max(cut, 0)], tokens[max(cut, 0) :]


@functools.lru_cache(maxsize=4)
def _order(windows: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(windows, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The micro-batches of one rank, addressed by number.

    The stream is cut into windows of `seq_len` tokens, shuffled anew each epoch. Micro-batch `index` of all ranks
    together is the next `world_size * micro_batch` windows in the shuffled order, and each rank takes its own part. So
    an epoch shows every window once, and a run that resumes needs only the index.
    """

    tokens: torch.Tensor
    seq_len: int
    micro_batch: int
    rank: int
    world_size: int
    seed: int

    def __post_init__(self) -> None:
        """Check that there is at least one micro-batch."""
        if len(self) == 0:
            needed = self.seq_len * self.micro_batch * self.world_size
            raise ValueError(
                f"{len(self.tokens)} tokens are fewer than one micro-batch of all ranks ({needed}): "
                "give more text with --data, or lower --seq-len or the micro-batch size"
            )

    def order(self) -> dict[str, int]:
        """Return all values that determine the order of the data.

        A run with equal values can continue where another one stopped.
        """
        names = ("seq_len", "micro_batch", "world_size", "seed")
        return {"tokens": len(self.tokens), **{name: getattr(self, name) for name in names}}

    def __len__(self) -> int:
        """Return the number of whole micro-batches in one epoch."""
        return len(self.tokens) // self.seq_len // (self.micro_batch * self.world_size)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a micro-batch of this rank.

        Args:
            index: number of the micro-batch, from 0; after an epoch, numbers go on in the next one.

        Returns:
            int64, [micro_batch, seq_len].
        """
        epoch, place = divmod(index, len(self))
        order = _order(len(self.tokens) // self.seq_len, self.seed, epoch)
        first = (place * self.world_size + self.rank) * self.micro_batch
        starts = (order[first : first + self.micro_batch] * self.seq_len).tolist()
        return torch.stack([self.tokens[start : start + self.seq_len] for start in starts]).long()
