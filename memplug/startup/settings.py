"""Settings that `memplug run` passes to the processes of its command, in one environment variable."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunSettings:
    """The settings of one `memplug run`.

    Attributes:
        config: absolute path of the file of `--config`, which has the block for engines and models without a block;
            None without that option.
        notes: folder for the processes' notes (`memplug.startup.outcome`).
    """

    config: Path | None
    notes: Path

    def text(self) -> str:
        """Return the settings as the value of the environment variable."""
        return json.dumps({"config": None if self.config is None else str(self.config), "notes": str(self.notes)})

    @classmethod
    def read(cls, text: str) -> RunSettings:
        """Return the settings from the value of the environment variable."""
        found = json.loads(text)
        return cls(None if found["config"] is None else Path(found["config"]), Path(found["notes"]))
