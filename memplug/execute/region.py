"""One module that runs token-wise, what the plan says of it, and what its forwards have shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memplug.execute import operators
from memplug.execute.operators import Kind
from memplug.execute.tape import Record, records_of

if TYPE_CHECKING:
    from memplug.execute.frame import Frame


class Region:
    """One module that runs token-wise.

    Args:
        name: the module's qualified name.
        kind: the name of its class.
        rows: fraction of the rows of every matmul's output to swap, [0, 1].

    Attributes:
        key: regions of one key ran the same operators and share a plan.
        swaps_input: whether its input leaves for the host; else it is held.
        forward_bytes: what one forward sends to the host by the plan; None before there is one.
        planned_from: records of the forward that the plan was made from; None before there is one.
        plan: operator index -> (operator, fraction, keep on the device), from the planner; None before there is one.
        unneeded: operator index -> operator, where no backward ever asked for the captured output: not captured again.
        communicates: its forward contains collectives that a recompute pass runs again, so that all ranks must
            recompute alike.
        opaque: why no tape tells what its forward does, such as work that no operator shows; "" where one does. Its
            input is all that is swapped, and a recompute pass runs the module again.
        seen: it has run forward.
        lingers: in the last step, backward always found its tensors on the device still, as it followed at once (MEMO,
            section 4.1: the last two layers): their copies out start only when they have to go after all.
        released: since that was found out, they had to go.
        familiar: its last forward did what an earlier one did; only a forward of an unfamiliar region is watched for
            work that no operator shows.
    """

    def __init__(self, name: str, kind: str, rows: float):
        self.name = name
        self.kind = self.key = kind
        self.rows = rows
        self.plan: Mapping[int, tuple[Any, float, bool]] | None = None
        self.swaps_input = True
        self.forward_bytes: int | None = None
        self.planned_from: Sequence[Record] | None = None
        self.unneeded: dict[int, Any] = {}
        self.communicates = False
        self.opaque = ""
        self.familiar = False
        self.seen = False
        self.lingers = False
        self.released = False
        self._forwards = 0
        self._named: _Named | None = None

    def ran(self, frame: Frame) -> None:
        """A forward is over."""
        self.seen = True
        self._forwards += 1
        self.communicates = self.communicates or frame.communicates

    def named(self, tape: Any) -> list[int]:
        """The operators of a native tape that a forward that does the same is to hand over when they are over."""
        if self._named is None or not self._named.holds(self, tape):
            self._named = _Named(self, tape, self._name(records_of(tape)))
        return self._named.indices

    def _name(self, records: Sequence[Record]) -> list[int]:
        named = []
        for index, record in enumerate(records):
            kind = operators.kind_of(record.func)
            fraction, _ = self.decide(index, record.func)
            if kind is Kind.COLLECTIVE or (fraction > 0 and record.capturable):
                named.append(index)
        return named

    def end_step(self) -> None:
        """Find out whether its tensors stay until backward."""
        self.lingers = self._forwards > 0 and not self.released
        self.released, self._forwards = False, 0

    def decide(self, index: int, func: Any) -> tuple[float, bool]:
        """Fraction of rows to swap of operator `index`, and whether to keep it on the device instead. The plan is
        advice: a forward that runs other operators than the planned one is captured by kind."""
        if self.unneeded.get(index) is func:
            return 0.0, False
        kind = operators.kind_of(func)
        if self.plan is not None and kind not in (Kind.CHOICE, Kind.COLLECTIVE):
            planned, fraction, keep = self.plan.get(index, (func, 0.0, False))
            if planned is func:
                return fraction, keep
        if kind is Kind.ROWS:
            return self.rows, False
        return float(kind is not None), False


class _Named:
    """What `Region.named` returned, and what that followed from."""

    def __init__(self, region: Region, tape: Any, indices: list[int]):
        self.indices = indices
        self._tape, self._plan, self._rows, self._unneeded = tape, region.plan, region.rows, dict(region.unneeded)

    def holds(self, region: Region, tape: Any) -> bool:
        same = self._tape is tape and self._plan is region.plan
        return same and self._rows == region.rows and self._unneeded == region.unneeded
