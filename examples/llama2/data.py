"""Text as bytes: the tokenizer, the train/validation split, and batches that depend on nothing but their index."""

import functools
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

VALIDATION_FRACTION = 0.05
DEFAULT_TEXT_BYTES = 4 * 2**20


class ByteTokenizer:
    """One token per byte, and one that ends a file; the model's vocabulary must hold `vocab_size` tokens or more."""

    end_of_text = 256
    vocab_size = 257

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the tokens of one file, end included: int16 [len(text) + 1]."""
        tokens = np.full(len(text) + 1, self.end_of_text, dtype=np.int16)
        tokens[:-1] = np.frombuffer(text, dtype=np.uint8)
        return tokens

    def decode(self, tokens: np.ndarray) -> bytes:
        """Returns the bytes of `tokens`; the end of a file, which is no byte, is left out."""
        return np.asarray(tokens)[np.asarray(tokens) < self.end_of_text].astype(np.uint8).tobytes()


def load_tokens(path: Path | None = None) -> torch.Tensor:
    """Reads text into one stream of tokens, files in the order of their names.

    Args:
        path: a file, or a folder whose files are all read. None: the modules of Python's own standard library, which
            every machine has, up to `DEFAULT_TEXT_BYTES`. These differ from one version of Python to another.

    Returns:
        int16 [tokens].

    Raises:
        FileNotFoundError: there is no text at `path`.
    """
    if path is None:
        files, limit = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), DEFAULT_TEXT_BYTES
    elif path.is_dir():
        files, limit = sorted(file for file in path.rglob("*") if file.is_file()), None
    else:
        files, limit = [path], None
    tokenizer = ByteTokenizer()
    pieces, total = [], 0
    for file in files:
        pieces.append(tokenizer.encode(file.read_bytes()))
        total += len(pieces[-1])
        if limit is not None and total >= limit:
            break
    if not pieces:
        raise FileNotFoundError(f"no files of text in {path}: give --data a file, or a folder with files in it")
    return torch.from_numpy(np.concatenate(pieces)[:limit])


def split(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts the stream in two: the first 95 % to train on, the rest to validate with."""
    cut = len(tokens) - int(len(tokens) * VALIDATION_FRACTION)
    return tokens[:cut], tokens[cut:]


@functools.lru_cache(maxsize=4)
def _order(windows: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(windows, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The micro-batches of one rank, addressed by number.

    The stream is cut into windows of `seq_len` tokens, shuffled anew each epoch. Micro-batch `index` of all ranks
    together is the next `world_size * micro_batch` windows of that order, and each rank takes its own part. So an epoch
    shows every window once, and a run that resumes needs to know only the index.
    """

    tokens: torch.Tensor
    seq_len: int
    micro_batch: int
    rank: int
    world_size: int
    seed: int

    def __post_init__(self) -> None:
        if len(self) == 0:
            needed = self.seq_len * self.micro_batch * self.world_size
            raise ValueError(
                f"{len(self.tokens)} tokens are fewer than one micro-batch of all ranks ({needed}): "
                "give more text (validation takes 5 % of it), or lower --seq-len or the micro-batch size"
            )

    def order(self) -> dict[str, int]:
        """Returns what the order of the data follows from: batches that agree in it go on where others left off."""
        names = ("seq_len", "micro_batch", "world_size", "seed")
        return {"tokens": len(self.tokens), **{name: getattr(self, name) for name in names}}

    def __len__(self) -> int:
        """Whole micro-batches in one epoch."""
        return len(self.tokens) // self.seq_len // (self.micro_batch * self.world_size)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Returns micro-batch `index` (from 0, without end) of this rank: int64 [micro_batch, seq_len]."""
        epoch, place = divmod(index, len(self))
        order = _order(len(self.tokens) // self.seq_len, self.seed, epoch)
        first = (place * self.world_size + self.rank) * self.micro_batch
        starts = (order[first : first + self.micro_batch] * self.seq_len).tolist()
        return torch.stack([self.tokens[start : start + self.seq_len] for start in starts]).long()
