"""One module that runs token-wise, what the plan says of it, and what its forwards have shown."""

from __future__ import annotations

from typing import Any

from memplug.tokenwise.engine.core import core
from memplug.tokenwise.plan.decisions import Setting


class Region:
    """One module that runs token-wise.

    Args:
        name: the module's qualified name.
        kind: the name of its class.
        rows, is_agreed: see `Setting`.

    Attributes:
        key: of what it ran last, see `Setting`.
        setting: what it runs by, from the next forward on.
        partners: ranks that its units talk to past torch's operators; None: not known.
        unknown_state: of `memplug.tokenwise.engine.state`, where it depends on state that cannot be put back.
        native: the same for the native core, and what that found out (native/tape/region.h).
    """

    def __init__(self, name: str, kind: str, rows: float = 0.0, is_agreed: bool = False):
        self.native: Any = core().Region(kind)
        self.name, self.kind = name, kind
        self._opaque = ""
        self.unknown_state: Any = None
        self.partners: frozenset[int] | None = frozenset()
        self.set(Setting(kind, rows, is_agreed=is_agreed))

    def set(self, setting: Setting) -> None:
        """Run by another setting; what was learnt under the former one is forgotten."""
        self.setting, self.key = setting, setting.key
        native, plan = self.native, setting.plan
        native.plan(plan)
        native.rows, native.swaps_input = setting.rows, setting.swaps_input
        native.is_agreed = setting.is_agreed
        native.forward_bytes, native.planned_from = setting.forward_bytes, setting.planned_from
        if setting.learnt is not None:
            native.seen, native.communicates = True, setting.learnt.communicates
            native.offloads_late, native.asks = setting.learnt.offloads_late, setting.learnt.asks
            for index, name in setting.learnt.unneeded.items():
                native.leave_out(index, name)

    @property
    def is_plain(self) -> bool:
        """It runs as it would without memplug, unless it is given more than was planned for."""
        return self.setting.plain_bytes is not None

    @property
    def opaque(self) -> str:
        """Why no tape tells what its forward does, such as work that no operator shows; "" where one does. Its input is
        all that is swapped, and a recompute pass runs the module again.
        """
        return self._opaque

    @opaque.setter
    def opaque(self, why: str) -> None:
        self._opaque, self.native.opaque = why, bool(why)
