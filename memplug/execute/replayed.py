"""A forward that the native core observes. It notes every operator and every tensor that autograd saves
(`memplug/native/forward.h`), or finds that they are those of an earlier forward's tape; what is captured leaves for the
host (`memplug/native/frame.h`). Autograd gets a small object instead of each tensor, and has it back in one of three
ways:

* it is held: a parameter, a mask, anything that was there before the region;
* from a copy: all of its storage is captured, or is a region input's;
* from a recompute pass, which runs the operators of the tape that the saved tensors depend on, up to what is captured.

An opaque forward's tape is not all that it did: its input is swapped, and its recompute pass runs the module again.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from memplug.errors import RecomputeError
from memplug.execute import garbage
from memplug.execute.frame import Frame
from memplug.execute.saved import Held, copy_of
from memplug.execute.tape import UNOBSERVED, Tape, records_of
from memplug.execute.watch import AddressMode

if TYPE_CHECKING:
    from memplug.execute.region import Region
    from memplug.execute.tokenwise import Executor

_TRANSPARENT = {"AsyncCollectiveTensor", "DTensor"}


class Replayed(Frame):
    """See the module's text."""

    def __init__(self, core: Any, executor: Executor, region: Region, *rest: Any):
        self.core = core
        executor.flow.make_room()
        known = [] if region.opaque else executor.tapes.known(region)
        self.native = core.Frame(known, self, executor.flow, region.native, executor.regathers)
        self.native.timed = executor.timing
        self.stamps: list[Any] = []
        self.written: dict[int, Held] = {}  # inputs that the forward wrote to, by storage: copies of the value before
        self.changing: set[int] = set()  # storages from outside whose contents a pass need not find unchanged
        super().__init__(executor, region, *rest)
        previous = executor.newest() if executor.newest is not None else None
        if previous is not None:
            self.native.follow(previous.native)
        executor.newest = weakref.ref(self)
        executor.flow.begin(self.native)

    def _enter(self, value: torch.Tensor, swaps: bool) -> Any:
        return self.native.enter(value, swaps)

    def _acquire(self, part: Any) -> torch.Tensor:
        return self.native.acquire(part)

    def _consume(self, part: Any) -> None:
        self.native.consume(part)

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, args: Any, kwargs: Any) -> Any:
        autograd, native, region = torch._C._autograd, self.native, self.region
        begin = self.executor.device.stamp() if native.timed else None
        watch = contextlib.nullcontext() if region.familiar else AddressMode(self.core)
        with self.ambient.during_forward(), garbage.outside(), watch:
            autograd._push_saved_tensors_default_hooks(native.pack(), self.core.unpack)
            try:
                native.begin()
                out = self.call(*args, **kwargs)
                tape = native.finish()
            finally:
                native.end()
                autograd._pop_saved_tensors_default_hooks()
        if isinstance(watch, AddressMode) and watch.taken:
            native.blind(UNOBSERVED)
        with self.executor.own:
            self._close(tape, begin)
        return out

    def _close(self, tape: Any, begin: Any) -> None:
        """The forward is over: what a recompute pass does is decided."""
        executor, native, region = self.executor, self.native, self.region
        native.close(executor.direct(region))
        self.opaque, self.communicates = native.is_opaque, native.communicates
        self.offered, self.offered_bytes, self.saved_bytes = native.offered, native.offered_bytes, native.saved_bytes
        if not self.opaque:
            executor.tapes.keep(region, tape)
            self.records = records_of(tape)
        if native.timed:
            self.tape = Tape(tape, {native.storage_of(i) for i in range(native.saved)} - {-1})
            self.tape.stamps, self.tape.span = self.stamps, (begin, executor.device.stamp())
            self.tape.spared, self.tape.fetched = native.spared, native.fetched
        executor.note(self)
        region.familiar = native.followed is not None

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

    def before_foreign_write(self, storage: int, tensor: torch.Tensor) -> None:
        """An operator is about to write to memory from outside, which a recompute pass must find as it is now."""
        with self.executor.own:
            held = [] if self.executor.is_scratch(tensor) else self.note_foreign_write(tensor)
            if held:
                self.written[storage] = held[0]
            else:
                self.changing.add(storage)

    # -- backward ----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Backward asks for a saved tensor of a timed forward."""
        if self.tape is not None and self.tape.backward_begin is None:
            self.tape.backward_begin = self.executor.device.stamp()

    def restore(self) -> None:
        """Run the recompute pass: backward asks for a saved tensor that has to be recomputed, and that is not there. It
        gives all of them, and the first that a further backward asks for does so again.
        """
        with self.executor.guard("recompute", self.region):
            self.native.forget()
            begin = self.executor.device.stamp() if self.native.timed else None
            self._recompute()
            self.native.is_restored = True
            if self.tape is not None:
                self.tape.recompute_span = (begin, self.executor.device.stamp())

    def _recompute(self) -> None:
        native = self.native
        if self.opaque:
            self.writes_input = native.writes_input
            self.rerun(native.saved, native.has_to_restore, native.restore)
            return
        try:
            self._replay()
        except self.core.Diverged as divergence:
            if native.has_launches or (native.decide({}, []), native.communicates)[1]:
                raise RecomputeError(f"region {self.region.name}: {divergence}") from None
            self.executor.diverged(self.region, str(divergence))
            self._replay()

    def _replay(self) -> None:
        with self.executor.gathered(self.region), self.buffers.as_before():
            reads = self.native.reads() if self.written else ()
            # the pass writes to them as the forward did
            written = {number: copy_of(self.written[number].get()) for number in reads if number in self.written}
            self.native.replay(written, list(self.changing))
