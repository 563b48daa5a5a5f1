"""Notes of a run's processes, from which memplug explains at the end of a run why it attached to no model."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

_LOOPS = {
    "deepspeed": "deepspeed.initialize",
    "megatron.training.training": "Megatron-LM's training loop",
    "transformers.trainer": "Trainer.train",
    "lightning.pytorch.trainer.trainer": "Trainer.fit",
    "pytorch_lightning.trainer.trainer": "Trainer.fit",
}


@dataclass
class Outcome:
    """The notes of a run's processes on what memplug did in them.

    Attributes:
        folder: folder that the processes share; None if there is only this process.
        settled: True once memplug attached to a model, or a block said `"enabled": false`.
        imported: the imported modules that memplug patches.
        off: reasons why memplug did not attach to an engine or a model, in the order of their first occurrence.
    """

    folder: Path | None = None
    settled: bool = False
    imported: list[str] = field(default_factory=list)
    off: list[str] = field(default_factory=list)

    def note(self, kind: str, text: str = "") -> None:
        """Add a note, and append it to this process's file in `folder`, which the process that started the run reads.

        On another machine, the folder may not exist; then nothing is written.

        Args:
            kind: "settled", "imported" or "off".
            text: the module's name, or the reason; one line.
        """
        self._add(kind, text)
        if self.folder is not None:
            with contextlib.suppress(OSError), open(self.folder / str(os.getpid()), "a", encoding="utf-8") as file:
                file.write(f"{kind} {text}\n")

    def leave(self, reason: str) -> None:
        """Note that memplug leaves an engine or a model alone.

        Args:
            reason: one line; "" if nothing is to be explained: memplug attached, or the block is off.
        """
        self.note("off" if reason else "settled", reason)

    def read(self) -> None:
        """Add the notes of all processes that share the folder."""
        assert self.folder is not None
        for file in sorted(self.folder.iterdir(), key=lambda file: file.stat().st_mtime_ns):
            for line in file.read_text(encoding="utf-8").splitlines():
                kind, _, text = line.partition(" ")
                self._add(kind, text)

    def explain(self) -> str | None:
        """Return one line on why memplug attached to no model; None if `settled`."""
        if self.settled:
            return None
        if self.off:
            return f"memplug: nothing was attached: {'; '.join(self.off)}"
        called = dict.fromkeys(_LOOPS[module] for module in self.imported)
        if called:
            return f"memplug: nothing was attached: no process called {' or '.join(called)}"
        return (
            "memplug: nothing was attached: no process imported DeepSpeed, Megatron-LM's training loop, or the Trainer "
            "of transformers or Lightning. In other loops, call memplug.attach(model)"
        )

    def _add(self, kind: str, text: str) -> None:
        if kind == "settled":
            self.settled = True
        elif text not in (found := getattr(self, kind)):
            found.append(text)
