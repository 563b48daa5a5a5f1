"""What one forward of a region captures of its operators' outputs, each on its way to the host or kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memplug.execute import operators
from memplug.execute.saved import Capture, Kept
from memplug.execute.tape import Record, fills_storage, record_at
from memplug.execute.transfer import Swapped

if TYPE_CHECKING:
    from memplug.execute.region import Region
    from memplug.execute.tokenwise import Executor


class Captures:
    """Of one frame.

    Args:
        native: its forward.

    Attributes:
        by_operator: what was captured of each, by its index on the tape.
        launches: where a collective is launched, or the memory made that it fills -> where its result is there,
            captured.
        swapped: tensors with a copy on the host, in the order of their copies out; region inputs too.
        parts: captured tensors by the number of their storage, while the forward runs.
    """

    def __init__(self, native: Any, region: Region, executor: Executor):
        self._native, self._region, self._executor = native, region, executor
        self.by_operator: dict[int, Capture] = {}
        self.launches: dict[int, int] = {}
        self.swapped: list[Swapped] = []
        self.parts: dict[int, Swapped | Kept] = {}

    @property
    def whole(self) -> dict[int, bool]:
        """Captured operators; whether all of their rows are."""
        return {index: capture.whole for index, capture in self.by_operator.items()}

    def add(self, tensor: torch.Tensor, part: Swapped | Kept) -> int:
        """A tensor of the forward has a copy; returns the number of its storage."""
        number = self._native.set_captured(tensor, part.whole)
        self.parts[number] = part
        if isinstance(part, Swapped):
            self.swapped.append(part)
        return number

    def capture(self, index: int, record: Record, outputs: list[torch.Tensor], fraction: float, keep: bool) -> None:
        """Start the outputs of one operator on their way to the host, the first `fraction` of the rows of each."""
        kind = operators.kind_of(record.func)
        if kind is operators.Kind.ROWS and not keep:
            fraction *= self._executor.share
        rows = round(fraction * outputs[0].shape[0]) if outputs[0].dim() else 0
        whole = rows == (outputs[0].shape[0] if outputs[0].dim() else 0)
        launch = self._launch(index, record) if kind is operators.Kind.COLLECTIVE else None
        if kind is operators.Kind.COLLECTIVE and launch is None:
            return
        splits = kind is operators.Kind.ROWS and operators.splits_by_rows(record.func, record.dimensions)
        if not whole and not splits:
            whole, rows = fraction >= 0.5, 0
        if not whole and rows == 0:
            return
        parts: list[Any] = []
        for value in outputs:
            part = self._part(value, None if whole else rows, keep, kind)
            if part is None:
                return  # the host is full: recomputed instead; parts that did leave are let go
            parts.append(part)
        self.by_operator[index] = Capture(parts, whole)
        for value, part in zip(outputs, parts, strict=True):
            self.add(value, part)
        if launch is not None:
            self.launches[launch] = index

    def capture_exchange(self, index: int, record: Record, written: list[torch.Tensor]) -> None:
        """Start the result of a collective that fills a tensor on its way to the host, where a recompute pass can put
        it in: on every rank or on none, since it follows from the operators alone. Else the pass runs it again.
        """
        if len(written) != 1 or not fills_storage(written[0]):
            return
        maker = self._native.sole_maker_of(index)
        if maker < 0:
            return
        self.launches[maker] = index
        if self.by_operator.pop(maker, None) is not None:
            self._region.unneeded[maker] = record_at(self._native, maker).func
        if self._region.unneeded.get(index) is record.func:
            self.by_operator[index] = Capture([], True)
            return
        part = self._part(written[0], None, False, operators.Kind.COLLECTIVE)
        self.by_operator[index] = Capture([part], True)
        self.add(written[0], part)

    def leave_out(self, index: int, record: Record) -> None:
        """A collective whose result no backward ever asked for: neither captured nor launched again."""
        launch = self._launch(index, record)
        if launch is not None:
            self.by_operator[index] = Capture([], True)
            self.launches[launch] = index

    def asked_of_ranks(self, records: list[Record]) -> set[int]:
        """The captured collectives that a recompute pass could ask for, whatever else this rank had room to capture: to
        leave one out is for all ranks to do.
        """
        shared = {i: True for i in self.by_operator if operators.kind_of(records[i].func) is operators.Kind.COLLECTIVE}
        return set(self._native.asked(shared, list(self.launches))) & set(shared) if shared else set()

    def _launch(self, index: int, record: Record) -> int | None:
        """The operator that launched the collective whose result is waited for; None where it is not this region's, or
        gives more results.
        """
        launch = self._native.maker_of(record.inputs[0], index)
        if launch < 0:
            return None
        launched = record_at(self._native, launch)
        if len(launched.results) > 1 or operators.returns_list(launched.func):
            return None
        return launch

    def _part(self, value: torch.Tensor, rows: int | None, keep: bool, kind: operators.Kind | None) -> Any:
        if keep or not self._executor.worth_swapping(value):
            return Kept(value) if rows is None else None
        rows = value.shape[0] if rows is None else rows
        part = self._executor.transfer.offload(value, rows, later=self._region.lingers)
        if part is None and kind in (operators.Kind.COLLECTIVE, operators.Kind.CHOICE):
            return Kept(value)  # recomputing it alone would leave other ranks waiting, or choose differently
        return part
