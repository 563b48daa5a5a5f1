"""Bytes of saved tensors on the device, as the native core counts them too (memplug/native/ledger.h)."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Ledger:
    """For an executor without the native core.

    Attributes:
        recomputed_bytes: of recompute passes, that backward has not taken yet.
        waiting: captured tensors that are away, and that backward will ask for.
    """

    def __init__(self) -> None:
        self.recomputed_bytes = 0
        self.waiting = 0
        self._lent: list[tuple[StorageWeakRef, int]] = []

    def lend(self, tensor: torch.Tensor) -> None:
        """Autograd has taken a restored tensor: its memory counts until autograd lets it go."""
        storage = tensor.untyped_storage()
        self._lent.append((StorageWeakRef(storage), storage.nbytes()))

    def lent_bytes(self) -> int:
        """Of all that autograd still has."""
        self._lent = [entry for entry in self._lent if not entry[0].expired()]
        return sum(nbytes for _, nbytes in self._lent)
