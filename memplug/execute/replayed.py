"""A forward that the native core observes. It notes every operator and every tensor that autograd saves
(`memplug/native/forward.h`), or finds that they are those of an earlier forward's tape; what is captured leaves for the
host. Autograd gets a small object instead of each tensor, and has it back in one of three ways:

* it is held: a parameter, a mask, anything that was there before the region;
* from a copy: all of its storage is captured, or is a region input's;
* from a recompute pass, which runs the operators of the tape that the saved tensors depend on, up to what is captured.

An opaque forward's tape is not all that it did: its input is swapped, and its recompute pass runs the module again.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from memplug.errors import RecomputeError
from memplug.execute import garbage, operators
from memplug.execute.captures import Captures
from memplug.execute.frame import Frame
from memplug.execute.operators import Kind
from memplug.execute.saved import Held, Kept, copy_of
from memplug.execute.tape import UNOBSERVED, Form, Tape, record_at, records_of
from memplug.execute.transfer import Swapped
from memplug.execute.watch import AddressMode

if TYPE_CHECKING:
    from memplug.execute.region import Region
    from memplug.execute.tokenwise import Executor

_TRANSPARENT = {"AsyncCollectiveTensor", "DTensor"}
_VIEW = 1  # of `Way` in memplug/native/forward.h


class Replayed(Frame):
    """See the module's text."""

    def __init__(self, core: Any, executor: Executor, region: Region, *rest: Any):
        self.core = core
        known = [] if region.opaque else executor.tapes.known(region)
        self.native = core.Forward(known, self, executor.regathers, executor.ledger)
        if known:
            self.native.name(region.named(known[0]), len(known[0]))
        self.native.timed = executor.timing
        if region.plan is not None:
            self.native.plan(list(region.plan))
        self.captured = Captures(self.native, region, executor)
        self.stamps: list[Any] = []
        self.provided: dict[int, Any] = {}  # storages of inputs whose memory is elsewhere by the time of a pass
        self.changing: set[int] = set()  # storages from outside whose contents a pass need not find unchanged
        super().__init__(executor, region, *rest)
        self.captured.swapped = self.swapped

    # -- forward -----------------------------------------------------------------------------------------------------

    def entered(self, value: torch.Tensor, part: Swapped | None) -> None:
        number = self.native.enter(value, part is not None)
        if part is not None:
            self.captured.parts[number] = self.provided[number] = part
            self.native.set_captured(value, part.whole)

    def forward(self, args: Any, kwargs: Any) -> Any:
        autograd, executor = torch._C._autograd, self.executor
        begin = executor.device.stamp() if self.timed else None
        watch = contextlib.nullcontext() if self.region.familiar else AddressMode(self.core)
        with self.ambient.during_forward(), garbage.outside(), watch:
            autograd._push_saved_tensors_default_hooks(self.native.pack(), self.core.unpack)
            try:
                self.native.begin()
                out = self.call(*args, **kwargs)
                tape = self.native.close()
            finally:
                self.native.end()
                autograd._pop_saved_tensors_default_hooks()
        if isinstance(watch, AddressMode) and watch.taken:
            self.native.blind(UNOBSERVED)
        with executor.own:
            self._close(tape, begin)
        return out

    def time(self, index: int, over: bool) -> None:
        """An operator begins, or is over."""
        stamp = self.executor.device.stamp()
        if over:
            self.stamps[index] = (self.stamps[index], stamp)
        else:
            self.stamps.append(stamp)

    def is_transparent(self, tensor: torch.Tensor) -> bool:
        """Whether a subclass's own dispatch only calls other operators, which are seen."""
        return type(tensor).__name__ in _TRANSPARENT

    def capture(self, index: int, tensors: list[torch.Tensor]) -> None:
        """An operator is over that the policy may name: capture what it returned, or what it filled."""
        if self.region.opaque:
            return
        with self.executor.own:
            record = record_at(self.native, index)
            if record.form is Form.EXCHANGE:
                if operators.kind_of(record.func) is Kind.COLLECTIVE:
                    self.captured.capture_exchange(index, record, tensors)
            else:
                fraction, keep = self.region.decide(index, record.func)
                if fraction > 0 and record.capturable:
                    self.captured.capture(index, record, tensors, fraction, keep)
                elif fraction == 0 and operators.kind_of(record.func) is Kind.COLLECTIVE:
                    self.captured.leave_out(index, record)
            self.pending_bytes = self.native.pending_bytes
            self.executor.trim(self)

    def before_write(self, storage: int, tensor: torch.Tensor) -> None:
        """An operator is about to write: what is captured must keep the value of now, and a recompute pass must
        find memory from outside as it is now.
        """
        with self.executor.own:
            part = self.captured.parts.pop(storage, None)
            if isinstance(part, Swapped):
                self.executor.transfer.before_write(part)
                self.writes_input = self.writes_input or storage in self.provided
            elif part is not None:
                part.before_write()
            elif self.executor.is_scratch(tensor):
                self.changing.add(storage)
            elif held := self.note_foreign_write(tensor):
                self.provided[storage] = held[0]
            else:
                self.changing.add(storage)

    def _close(self, tape: Any, begin: Any) -> None:
        """The forward is over: decide what a recompute pass does, and release what it does not need."""
        executor, native = self.executor, self.native
        views, self.recomputes = native.sort(self.direct)
        for number, count in views.items():
            part = self.captured.parts[number]
            if isinstance(part, Swapped):
                part.uses += count
        self.opaque = bool(self.region.opaque or native.opaque)
        if self.opaque:
            inputs = [item for item in self.inputs if isinstance(item, Swapped)]
        else:
            executor.tapes.keep(self.region, tape)
            self.records = records = records_of(tape)
            asked = self._decide()
            reads = native.reads() if self.recomputes else []
            inputs = [self.provided[number] for number in reads if isinstance(self.provided.get(number), Swapped)]
        for part in inputs:
            part.uses += self.recomputes
        if self.timed:
            self.tape = Tape(tape, {native.storage_of(i) for i in range(native.saved)} - {-1})
            self.tape.stamps, self.tape.span = self.stamps, (begin, executor.device.stamp())
        if not self.opaque:
            self._learn(records, asked)
        self.saved_bytes, self.pending_bytes = native.saved_bytes, native.pending_bytes
        self.largest_saved_bytes = native.largest_saved_bytes
        self._finish()
        self.region.familiar = native.followed is not None

    def _decide(self) -> list[int]:
        """What a recompute pass does; returns the captured operators whose results it asks for."""
        captured = self.captured
        asked, self.communicates = self.native.decide(captured.whole, list(captured.launches))
        absent = [index for index in asked if not captured.by_operator[index].parts]
        if absent:  # this forward is another than those before: run the collectives again after all
            for index in absent:
                del captured.by_operator[index]
            captured.launches = {launch: i for launch, i in captured.launches.items() if i in captured.by_operator}
            self.region.unneeded.clear()
            return self._decide()
        if not self.recomputes:
            return []
        for index in asked:
            for part in captured.by_operator[index].parts:
                if isinstance(part, Swapped):
                    part.uses += 1
        return asked

    def _learn(self, records: list[Any], substituted: list[int]) -> None:
        """Which captures nobody asks for: they are not made again."""
        captured = self.captured
        of_ranks = captured.asked_of_ranks(records)
        asked = {*of_ranks, *substituted}
        for index, capture in captured.by_operator.items():
            used = index in asked or any(getattr(part, "uses", 0) for part in capture.parts)
            if not used and operators.kind_of(records[index].func) is not Kind.CHOICE:
                self.region.unneeded[index] = records[index].func
        if self.tape is not None:
            launched = {index: launch for launch, index in captured.launches.items()}
            self.tape.spared = {*launched, *captured.launches}
            self.tape.fetched.update(*(records[launched[index]].outputs for index in of_ranks & set(launched)))

    # -- backward ----------------------------------------------------------------------------------------------------

    def unpack(self, index: int) -> torch.Tensor:
        """Saved tensor `index`, which is not held."""
        with self.executor.own:
            self.fetch()
            if self.native.way(index) != _VIEW:
                self.native.forget()
                self.restore()
                return self.native.take(index)
            part = self.captured.parts[self.native.storage_of(index)]
            if isinstance(part, Kept):
                return self.native.view(index, part.get())
            tensor, _ = self.executor.transfer.acquire(part)
            view = self.native.view(index, tensor)
            self.consume(part)
            if part.tensor is None:
                self.executor.ledger.lend(view)
            return view

    def recompute(self) -> None:
        if self.opaque:
            self.rerun(self.native.saved, self._is_alive)
            return
        try:
            self._replay()
        except self.core.Diverged as divergence:
            if self.captured.launches or self.native.decide({}, [])[1]:
                raise RecomputeError(f"region {self.region.name}: {divergence}") from None
            self.executor.diverged(self.region, str(divergence))
            self._replay()

    def _is_alive(self, index: int) -> bool:
        return self.native.is_alive(index) and self.native.way(index) > _VIEW

    def _replay(self) -> None:
        executor = self.executor
        executor.pump(self)
        with executor.gathered(self.region), self.buffers.as_before():
            given = {number: self._given(number) for number in self.native.reads() if number in self.provided}
            self.native.replay(given, list(self.changing), self._substitute)
            del given
        for number in self.native.reads():
            if isinstance(self.provided.get(number), Swapped):
                self.consume(self.provided[number])

    def store(self, index: int, tensor: torch.Tensor) -> None:
        self.native.restore(index, tensor)

    def _given(self, number: int) -> torch.Tensor:
        """A region input's memory, for a pass that writes to it as the forward did."""
        item = self.provided[number]
        if isinstance(item, Held):
            return copy_of(item.get())
        tensor, _ = self.executor.transfer.acquire(item)
        return copy_of(tensor) if item.mutated else tensor

    def _substitute(self, index: int) -> tuple[list[torch.Tensor], int]:
        """The captured results of an operator, and how many rows of them are there, -1 for all; other rows are computed
        into the same memory.
        """
        tensors, have = [], -1
        for part in self.captured.by_operator[index].parts:
            if isinstance(part, Swapped):
                tensor, rows = self.executor.transfer.acquire(part)
                have = rows if rows < tensor.shape[0] else have
                tensors.append(tensor.detach())
                self.consume(part)
            else:
                tensors.append(part.fresh())
        return tensors, have
