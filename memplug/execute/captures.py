"""What one forward of a region captures of its operators' outputs, each on its way to the host or kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memplug.execute import operators
from memplug.execute.saved import Capture, Kept
from memplug.execute.tape import Action, Form, Tape, fills_storage, storage_of
from memplug.execute.transfer import Swapped

if TYPE_CHECKING:
    from memplug.execute.tokenwise import Executor, Region


class Captures:
    """Of one frame.

    Attributes:
        by_operator: what was captured of each, by its index on the tape.
        launches: where a collective is launched, or the memory made that it fills -> where its result is there,
            captured.
        swapped: tensors with a copy on the host, in the order of their copies out; region inputs too.
        storages: captured tensors by the address of their storage, while the forward runs.
    """

    def __init__(self, tape: Tape, region: Region, executor: Executor):
        self._tape, self._region, self._executor = tape, region, executor
        self.by_operator: dict[int, Capture] = {}
        self.launches: dict[int, int] = {}
        self.swapped: list[Swapped] = []
        self.storages: dict[int, Swapped | Kept] = {}

    def capture(
        self, index: int, func: Any, args: Any, kwargs: dict[str, Any], out: Any, fraction: float, keep: bool
    ) -> None:
        """Start the outputs of one operator on their way to the host, the first `fraction` of the rows of each."""
        outputs = list(out) if isinstance(out, (tuple, list)) else [out]
        kind = operators.kind_of(func)
        if kind is operators.Kind.ROWS and not keep:
            fraction *= self._executor.share
        rows = round(fraction * outputs[0].shape[0]) if outputs[0].dim() else 0
        whole = rows == (outputs[0].shape[0] if outputs[0].dim() else 0)
        launch = self._launch(args[0]) if kind is operators.Kind.COLLECTIVE else None
        if kind is operators.Kind.COLLECTIVE and launch is None:
            return
        if not whole and (kind is not operators.Kind.ROWS or not operators.splits_by_rows(func, args)):
            whole, rows = fraction >= 0.5, 0
        if not whole and rows == 0:
            return
        parts: list[Any] = []
        for value in outputs:
            part = self._part(value, None if whole else rows, keep, kind)
            if part is None and isinstance(value, torch.Tensor):
                return  # the host is full: recomputed instead; parts that did leave are let go
            parts.append(part)
        rng_after = self._executor.device.get_rng_state() if operators.draws(func, args, kwargs) else None
        self.by_operator[index] = Capture(parts, isinstance(out, (tuple, list)), whole, rng_after)
        for value, part in zip(outputs, parts, strict=True):
            if isinstance(value, torch.Tensor):
                self.storages[storage_of(value)] = part
            if isinstance(part, Swapped):
                self.swapped.append(part)
        if launch is not None:
            self.launches[launch] = index

    def capture_exchange(self, index: int, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Start the result of a collective that fills a tensor on its way to the host, where a recompute pass can put
        it in: on every rank or on none, since it follows from the operators alone. Else the pass runs it again.
        """
        written = operators.written_arguments(func, args, kwargs)
        fills = operators.kind_of(func) is operators.Kind.COLLECTIVE and operators.is_over(func, args, kwargs)
        if not fills or len(written) != 1 or not operators.can_stand_in() or not fills_storage(written[0]):
            return
        maker = self._tape.sole_maker(index)
        if maker is None:
            return
        self.launches[maker] = index
        if self.by_operator.pop(maker, None) is not None:
            self._region.unneeded[maker] = self._tape.records[maker].func
        if self._region.unneeded.get(index) is func:
            self.by_operator[index] = Capture([], False, True)
            return
        part = self._part(written[0], None, False, operators.Kind.COLLECTIVE)
        self.by_operator[index] = Capture([part], False, True)
        self.storages[storage_of(written[0])] = part
        if isinstance(part, Swapped):
            self.swapped.append(part)

    def leave_out(self, index: int, args: Any) -> None:
        """A collective whose result no backward ever asked for: neither captured nor launched again."""
        launch = self._launch(args[0])
        if launch is not None:
            self.by_operator[index] = Capture([], False, True)
            self.launches[launch] = index

    def asked_of_ranks(self) -> set[int]:
        """The captured collectives that a recompute pass could ask for, whatever else this rank had room to capture: to
        leave one out is for all ranks to do.
        """
        kinds = {index: operators.kind_of(self._tape.records[index].func) for index in self.by_operator}
        shared = {index: True for index, kind in kinds.items() if kind is operators.Kind.COLLECTIVE}
        if not shared:
            return set()
        actions = self._tape.actions(shared, self.launches, self._tape.asked)
        asked = {index for index in shared if actions[index] is Action.SUBSTITUTE}
        self._tape.spared = {index for index in shared if self._tape.records[index].form is Form.EXCHANGE}
        self._tape.fetched.update(*(self._tape.records[index].outputs for index in asked & self._tape.spared))
        return asked

    def _launch(self, waited: torch.Tensor) -> int | None:
        """The operator that launched the collective whose result is waited for; None where it is not this region's, or
        gives more results.
        """
        launch = self._tape.maker_of(waited)
        if (
            launch is None
            or len(self._tape.records[launch].shapes) > 1
            or operators.returns_list(self._tape.records[launch].func)
        ):
            return None
        return launch

    def _part(self, value: Any, rows: int | None, keep: bool, kind: operators.Kind | None) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if keep or not self._executor.worth_swapping(value):
            return Kept(value) if rows is None else None
        rows = value.shape[0] if rows is None else rows
        part = self._executor.transfer.offload(value, rows, later=self._region.lingers)
        if part is None and kind in (operators.Kind.COLLECTIVE, operators.Kind.CHOICE):
            return Kept(value)  # recomputing it alone would leave other ranks waiting, or choose differently
        return part
