"""One module that runs token-wise, what the plan says of it, and what its forwards have shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from memplug.execute.core import core


def _native(name: str, text: str) -> Any:
    """An attribute that the native core reads, or sets (memplug/native/region.h)."""
    return property(
        lambda self: getattr(self.native, name), lambda self, value: setattr(self.native, name, value), doc=text
    )


class Region:
    """One module that runs token-wise.

    Args:
        name: the module's qualified name.
        kind: the name of its class.
        rows: fraction of the rows of every matmul's output to swap, [0, 1].

    Attributes:
        key: regions of one key ran the same operators and share a plan.
        plain_bytes: it runs as it would without memplug where it is given no more than so many bytes of tensors; None:
            it never does.
    """

    rows = _native("rows", "Fraction of the rows of every matmul's output to swap, where no plan says so.")
    forward_bytes = _native(
        "forward_bytes", "What one forward sends to the host by the plan; None before there is one."
    )
    offloads_late = _native(
        "offloads_late",
        "In the last step its backward ran before its tensors had to be released (MEMO, section 4.1: the last two "
        "layers), so offloading waits until release.",
    )
    peak = _native("peak", "The most of its forwards that were in flight at once.")
    swaps_input = _native("swaps_input", "Whether its input leaves for the host; else it is held.")
    planned_from = _native(
        "planned_from", "The native tape of the forward that the plan was made from; None before there is one."
    )
    communicates = _native(
        "communicates",
        "Its forward contains collectives that a recompute pass runs again, so that all ranks must recompute alike.",
    )
    seen = _native("seen", "It has run forward.")
    repeats = _native(
        "repeats",
        "Its last forward was verified against a template; only a forward of a region that does not repeat is watched "
        "for work that no operator shows.",
    )

    def __init__(self, name: str, kind: str, rows: float):
        known = core()
        self.native = known.Region(kind) if known is not None else _Alone()
        self.name = name
        self.kind = self.key = kind
        self.rows = rows
        self.plain_bytes: int | None = None
        self._plan: Mapping[int, tuple[Any, float, bool]] | None = None
        self._opaque = ""

    @property
    def plan(self) -> Mapping[int, tuple[Any, float, bool]] | None:
        """Operator index -> (operator, fraction, keep on the device), from the planner; None before there is one. With
        another plan, what was learnt under this one is forgotten.
        """
        return self._plan

    @plan.setter
    def plan(self, plan: Mapping[int, tuple[Any, float, bool]] | None) -> None:
        self._plan = plan
        by_name = plan and {index: (_name_of(func), fraction, keep) for index, (func, fraction, keep) in plan.items()}
        self.native.plan(by_name)

    @property
    def unneeded(self) -> dict[int, str]:
        """Operators by index, where no backward ever asked for the captured output: not captured again."""
        return self.native.unneeded

    @property
    def opaque(self) -> str:
        """Why no tape tells what its forward does, such as work that no operator shows; "" where one does. Its input is
        all that is swapped, and a recompute pass runs the module again.
        """
        return self._opaque

    @opaque.setter
    def opaque(self, why: str) -> None:
        self._opaque, self.native.opaque = why, bool(why)

    def note_given(self, nbytes: int) -> None:
        """A forward that the native core does not run is given tensors of so many bytes."""
        self.native.note_given(nbytes)

    def end_step(self) -> tuple[int, ...]:
        """Find out whether its tensors stay until backward.

        Returns:
            The bytes of all tensors given to each of the step's forwards, in order.
        """
        return tuple(self.native.end_step())

    def decide(self, index: int, func: Any) -> tuple[float, bool]:
        """Fraction of rows to swap of operator `index`, and whether to keep it on the device instead. The plan is
        advice: a forward that runs other operators than the planned one is captured by kind.
        """
        return self.native.decide(index, func._schema.name, func._schema.overload_name)


@dataclasses.dataclass
class _Alone:
    """Of a region without the native core: nothing of it is planned."""

    rows: float = 0.0
    forward_bytes: int | None = None
    offloads_late: bool = False
    opaque: bool = True
    peak: int = 1
    swaps_input: bool = True
    planned_from: None = None
    communicates: bool = False
    seen: bool = False
    repeats: bool = False
    unneeded: dict[int, str] = dataclasses.field(default_factory=dict)

    given_bytes: list[int] = dataclasses.field(default_factory=list)

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
