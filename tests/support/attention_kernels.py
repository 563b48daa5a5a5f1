"""Counts and settings of attention kernels on a GPU: flash-attn's, and cuDNN's behind Transformer Engine.

Kernels are counted by name; the settings make attention add in the same order each time.
"""

from __future__ import annotations

import collections
import re

import torch
from torch.profiler import ProfilerActivity, profile

FORWARD = "attention"
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine
    "FLASH_ATTENTION_DETERMINISTIC": "1",  # transformers
    "DS_ACCELERATOR": "cuda",
}
"""Environment variables that make attention deterministic."""
_FORWARD = re.compile(r"flash_fwd|fprop|softmax\w*forward")  # flash-attn's, cuDNN's, unfused


class Calls:
    """Counts attention kernels since `clear`, with the interface of the stand-ins' `calls`."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self.flops: dict[str, float] = {}

    def clear(self) -> None:
        """Start to count anew."""
        self._stopped()
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    @property
    def functions(self) -> dict[str, int]:
        """Stop counting; return each kernel's count by name, and the count of all attention forwards under FORWARD."""
        stopped = self._stopped()
        names = collections.Counter(event.name for event in stopped.events()) if stopped is not None else {}
        return {**names, FORWARD: sum(count for name, count in names.items() if _FORWARD.search(name))}

    def _stopped(self) -> profile | None:
        running, self._profile = self._profile, None
        if running is not None:
            torch.cuda.synchronize()
            running.stop()
        return running
