"""A module that runs token-wise, with its setting and the findings of its forwards, for each program of a session."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from memplug.tokenwise.engine.core import core
from memplug.tokenwise.plan.decisions import Setting


class _Run(NamedTuple):
    """How a region runs in one program: see the attributes of `Region`."""

    native: Any
    setting: Setting
    key: str


class Region:
    """A module that runs token-wise.

    Args:
        name: the module's qualified name.
        kind: the name of its class.
        rows: see `Setting`.
        is_agreed: see `Setting`.

    Attributes:
        key: names the operators that the region ran when it was last observed, see `Setting.key`.
        setting: the decisions by which it runs from the next forward on.
        program: the program that the next forward belongs to, see `turn`.
        partners: ranks that its units communicate with outside of torch's operators; None: unknown.
        unknown_state: the `memplug.tokenwise.engine.state.CallState` of a region with state that cannot be put back;
            else None.
        native: the region as the native core has it, with the core's findings (native/tape/region.h).
    """

    def __init__(self, name: str, kind: str, rows: float = 0.0, is_agreed: bool = False):
        self.native: Any = core().Region(kind)
        self.name, self.kind = name, kind
        self._opaque = ""
        self.unknown_state: Any = None
        self.partners: frozenset[int] | None = frozenset()
        self.program: Hashable = None
        self._runs: dict[Hashable, _Run] = {}  # by program, except the present one
        self.set(Setting(kind, rows, is_agreed=is_agreed))

    def set(self, setting: Setting) -> None:
        """Run by this setting from the next forward on, and forget findings of forwards under the earlier setting."""
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

    def turn(self, program: Hashable) -> None:
        """Run from the next forward on as in the last forward of this program: by its setting, with its findings.

        A program that has not run yet begins at the safest setting, with those findings of the present program that do
        not depend on the setting.
        """
        if program == self.program:
            return
        self._runs[self.program] = _Run(self.native, self.setting, self.key)
        known = self._runs.pop(program, None)
        self.program = program
        if known is not None:
            self.native, self.setting, self.key = known
            self.native.opaque = bool(self._opaque)
            return
        self.native = self.native.copy()
        self.set(Setting(self.kind))

    def forget(self, program: Hashable) -> None:
        """Forget how the region ran in a program; if that is the present one, only its setting stays."""
        self._runs.pop(program, None)

    def communicates_in(self, program: Hashable, unless: bool = False) -> bool:
        """Return whether the region's recompute passes launch collectives in this program, or may do so.

        Args:
            program: the program.
            unless: True to answer False for a program that has not run yet.
        """
        native = self.native_in(program)
        return native.communicates if native is not None else self.native.may_talk and not unless

    def native_in(self, program: Hashable) -> Any:
        """Return the region as the native core has it in this program; None if the program has not run yet."""
        if program == self.program:
            return self.native
        return self._runs[program].native if program in self._runs else None

    @property
    def is_plain(self) -> bool:
        """Return whether the region runs as without memplug while its arguments are no larger than its plan assumes."""
        return self.setting.plain_bytes is not None

    @property
    def opaque(self) -> str:
        """Return why the region is opaque; "" if it is not.

        No tape shows all that an opaque region's forward does, for example work without operators. Only its input is
        swapped, and its recompute pass runs the module again.
        """
        return self._opaque

    @opaque.setter
    def opaque(self, why: str) -> None:
        self._opaque, self.native.opaque = why, bool(why)
