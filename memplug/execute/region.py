"""One module that runs token-wise, what the plan says of it, and what its forwards have shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memplug.execute.core import core


@dataclass(frozen=True)
class Setting:
    """What a plan sets on one region. By itself the safest: input and attention outputs swapped, every matmul
    recomputed.

    Attributes:
        key: regions of one key ran the same operators and share a plan.
        rows: fraction of the rows of every matmul's output to swap, [0, 1], where no plan says so.
        plan: operator index -> (operator, fraction, keep on the device), from the planner; None before there is one.
        swaps_input: the input leaves for the host; else it is held.
        forward_bytes: that one forward sends to the host, as predicted; None where nothing was.
        planned_from: the native tape of the forward that the plan was made from.
        plain_bytes: it runs as it would without memplug where it is given no more than so many bytes of tensors; None:
            it never does.
    """

    key: str
    rows: float = 0.0
    plan: Mapping[int, tuple[Any, float, bool]] | None = None
    swaps_input: bool = True
    forward_bytes: int | None = None
    planned_from: Any = None
    plain_bytes: int | None = None


class Region:
    """One module that runs token-wise.

    Args:
        name: the module's qualified name.
        kind: the name of its class.
        rows: see `Setting`.

    Attributes:
        key: of what it ran last, see `Setting`.
        setting: what it runs by, from the next forward on.
        native: the same for the native core, and what that found out (memplug/native/region.h).
    """

    def __init__(self, name: str, kind: str, rows: float = 0.0):
        known = core()
        self.native: Any = known.Region(kind) if known is not None else _Alone()
        self.name, self.kind = name, kind
        self._opaque = ""
        self.set(Setting(kind, rows))

    def set(self, setting: Setting) -> None:
        """Run by another setting; what was learnt under the former one is forgotten."""
        self.setting, self.key = setting, setting.key
        native, plan = self.native, setting.plan
        native.plan(plan and {index: (_name_of(func), *decision) for index, (func, *decision) in plan.items()})
        native.rows, native.swaps_input = setting.rows, setting.swaps_input
        native.forward_bytes, native.planned_from = setting.forward_bytes, setting.planned_from

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


class _Alone:
    """Of a region without the native core: nothing of it is planned."""

    def __init__(self) -> None:
        self.given_bytes: list[int] = []

    def plan(self, plan: Any) -> None:
        """Without operators there are none to plan."""

    def note_given(self, nbytes: int) -> None:
        """A forward is given tensors of so many bytes."""
        self.given_bytes.append(nbytes)

    def end_step(self) -> list[int]:
        """Bytes of all tensors given to each forward of the step, in order."""
        given, self.given_bytes = self.given_bytes, []
        return given


def _name_of(func: Any) -> str:
    """As the native core calls an operator."""
    schema = func._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
