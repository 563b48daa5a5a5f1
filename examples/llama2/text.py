"""Reads text into one stream of tokens: tokenizers, files, folders and JSON lines."""

import itertools
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

DEFAULT_TOKENS = 4 * 2**20
"""Tokens of the default text, unless a run needs more."""
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test"}  # some machines have no tests installed


class Tokenizer(Protocol):
    """Turns a text into tokens; `vocab_size` is one more than the highest token."""

    vocab_size: int

    def encode(self, text: bytes) -> np.ndarray:
        """Return the tokens of one text, end included.

        Returns:
            `token_dtype(vocab_size)`, [tokens].
        """


class ByteTokenizer:
    """One token per byte, and one that ends a text; the model's vocabulary must hold `vocab_size` tokens or more."""

    end_of_text = 256
    vocab_size = 257

    def encode(self, text: bytes) -> np.ndarray:
        """Return the tokens of one text, end included.

        Returns:
            int16, [len(text) + 1].
        """
        tokens = np.full(len(text) + 1, self.end_of_text, dtype=np.int16)
        tokens[:-1] = np.frombuffer(text, dtype=np.uint8)
        return tokens

    def decode(self, tokens: np.ndarray) -> bytes:
        """Return the bytes of `tokens`, without the ends of texts."""
        return np.asarray(tokens)[np.asarray(tokens) < self.end_of_text].astype(np.uint8).tobytes()


class FolderTokenizer:
    """The tokenizer in a local folder of Hugging Face's; each text ends with its end-of-sequence token.

    Raises:
        ValueError: the folder holds no tokenizer that can be loaded, or one without an end-of-sequence token.
    """

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer  # imported only here, since bytes do not need it

        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # its loaders raise errors of all kinds
            raise ValueError(f"{folder} holds no tokenizer: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer in {folder} has no end-of-sequence token, which has to separate the texts")
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: bytes) -> np.ndarray:
        """Return the tokens of one text, end included; bytes that are not UTF-8 are replaced."""
        words = text.decode(errors="replace")
        ids = self._tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array([*ids, self._tokenizer.eos_token_id], dtype=token_dtype(self.vocab_size))


def token_dtype(vocab_size: int) -> type[np.signedinteger]:
    """Return the smallest type that holds every token of a vocabulary."""
    return np.int16 if vocab_size <= 2**15 else np.int32


def load_tokens(path: Path | None, tokenizer: Tokenizer, default_tokens: int = DEFAULT_TOKENS) -> torch.Tensor:
    """Read text into one stream of tokens, files in the order of their names.

    Args:
        path: a file, or a folder whose files are all read. In a .jsonl file each line is an object whose "text" is one
            text. None: the modules of Python's own standard library, which every machine has, though they differ from
            one version of Python to another.
        tokenizer: makes the tokens of each text.
        default_tokens: the largest number of tokens to read from the standard library.

    Returns:
        int16, or int32 where the vocabulary needs it, [tokens].

    Raises:
        FileNotFoundError: there is no text at `path`.
        ValueError: a line of a .jsonl file is no object with a "text".
    """
    pieces: Iterable[np.ndarray]
    if path is None:
        pieces = list(_until(default_tokens, map(tokenizer.encode, _texts(_standard_library()))))
        return torch.from_numpy(np.concatenate(pieces)[:default_tokens])
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    pieces = [tokenizer.encode(text) for text in _texts(files)]
    if not pieces:
        raise FileNotFoundError(f"no text in {path}: give --data a file, or a folder with files in it")
    return torch.from_numpy(np.concatenate(pieces))


def _standard_library() -> list[Path]:
    """Return the standard library's files: single modules first, then packages."""
    root = Path(sysconfig.get_path("stdlib"))
    packages = sorted(folder for folder in root.iterdir() if folder.is_dir() and folder.name not in _NOT_THE_LIBRARY)
    return [*sorted(root.glob("*.py")), *itertools.chain(*(sorted(folder.rglob("*.py")) for folder in packages))]


def _texts(files: Iterable[Path]) -> Iterator[bytes]:
    for file in files:
        if file.suffix != ".jsonl":
            yield file.read_bytes()
            continue
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of(line, f"{file}, line {number}")


def _text_of(line: bytes, where: str) -> bytes:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise ValueError(f'{where}: expected an object whose "text" is a string')
    return entry["text"].encode()


def _until(total: int, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for piece in pieces:
        yield piece
        total -= len(piece)
        if total <= 0:
            return
