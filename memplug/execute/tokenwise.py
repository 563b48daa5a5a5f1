"""Row-cached recompute over rounding buffers: MEMO's token-wise swapping and recomputation, at the operator level
(MEMO, section 4.1).

Any module can be a region. Its forward runs once under an observer that captures expensive outputs and sends their
first rows to the host; the region two further on waits for those copies and lets the memory go (two rounding buffers,
by reference). In backward, rows are fetched ahead of use within a limit of bytes that keeps the peak at full
recomputation's: what is restored at any time is at most the largest region's saved tensors, which full recomputation
has there too, plus the region inputs, which it never lets go.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from memplug.execute.core import core
from memplug.execute.device import Device
from memplug.execute.frame import Frame
from memplug.execute.host_pool import HostPool
from memplug.execute.in_flight import InFlight
from memplug.execute.ledger import Ledger
from memplug.execute.region import Region
from memplug.execute.replayed import Replayed
from memplug.execute.tape import Tapes, is_plain, reasons, storage_of
from memplug.execute.transfer import Swapped, Transfer, swappable
from memplug.execute.unobserved import Unobserved

log = logging.getLogger("memplug")

RESIDENT_REGIONS = 2  # rounding buffers
TEMPORARIES = 3  # of backward at a time: the gradients of a gated MLP's product and of its two factors


class _OfThread(threading.local):
    newest: weakref.ref[Frame] | None = None
    recomputing = 0


class Executor:
    """Runs regions, keeps their frames in order, and fetches ahead.

    Args:
        device: where the training runs.
        host_budget_bytes: bound of the pinned pool.
        min_offload_bytes: smaller tensors stay on the device.
        regathers: parameters are gathered in forward (ZeRO 3): every region recomputes on every rank, whatever is
            swapped.
    """

    def __init__(
        self, device: Device, host_budget_bytes: int, min_offload_bytes: int = 1 << 20, regathers: bool = False
    ):
        self.device = device
        self.pool = HostPool(device, host_budget_bytes)
        self.transfer = Transfer(device, self.pool)
        self.min_offload_bytes = min_offload_bytes
        self.regathers = regathers
        self.tapes = Tapes()
        self.share = 1.0  # of the rows that regions say, that are swapped: less where host memory has run out
        self._threads = _OfThread()
        self.timing = False
        known = core()
        self.ledger: Any = known.Ledger() if known is not None else Ledger()
        self.in_flight = InFlight(self.ledger)
        self.largest_region_bytes = 0
        self.largest_saved_bytes = 0
        self.divergences = 0
        self.expected_bytes = 0  # that forwards so far were to send to the host, by their plans
        self.unplanned = 0  # forwards that no plan says so of
        self.strayed = 0  # forwards that did something else than the one that their plan was made from
        self.opaque: collections.Counter[str] = collections.Counter()  # regions by the reason
        # around a region's forward and recompute: (phase, region) -> context manager
        self.guard: Callable[[str, Region], Any] = lambda phase, region: contextlib.nullcontext()
        # around a recompute pass that runs operators alone: a host brings back what parameters hold
        self.gathered: Callable[[Region], Any] = lambda region: contextlib.nullcontext()
        # hosts' states that random operators depend on, see `Ambient`
        self.surroundings: list[Callable[[], Callable[[], Any]]] = []
        # memory that a host lends to whoever runs: its contents are nobody's, before and after
        self.is_scratch: Callable[[torch.Tensor], bool] = lambda tensor: False
        self.on_frame: Callable[[Frame], None] | None = None  # the profile listens here
        # `with executor.own:` around operators that are no part of the program, for whoever watches it
        self.own: Any = contextlib.nullcontext()
        self._resident: collections.deque[weakref.ref[Frame]] = collections.deque()
        self._warned = False
        self._told_of_capture = False

    @property
    def newest(self) -> weakref.ref[Frame] | None:
        """This thread's last frame: backward asks for its tensors first."""
        return self._threads.newest

    @newest.setter
    def newest(self, frame: weakref.ref[Frame] | None) -> None:
        self._threads.newest = frame

    @property
    def recomputing(self) -> int:
        """Recompute passes under way on this thread that run the module again."""
        return self._threads.recomputing

    @recomputing.setter
    def recomputing(self, passes: int) -> None:
        self._threads.recomputing = passes

    def run(self, region: Region, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call(*args, **kwargs)`, the region's own forward. Without gradients nothing is noted or consumed."""
        if not torch.is_grad_enabled() or self._is_captured():
            return call(*args, **kwargs)
        with self.guard("forward", region):
            with self.own:
                self._make_room()
                frame = self._frame(region, call, args, kwargs)
            self.newest = weakref.ref(frame)
            self._resident.append(self.newest)
            out = frame.forward(args, kwargs)
        self._warn_if_full()
        return out

    def _frame(self, region: Region, *rest: Any) -> Frame:
        known = core()
        if known is not None:
            return Replayed(known, self, region, *rest)
        region.opaque = region.opaque or "the native core is missing"
        return Unobserved(self, region, *rest)

    def direct(self, region: Region) -> bool:
        """Whether backward may take captured tensors without a recompute pass.

        Not where the pass itself contains collectives, since ranks that swapped different rows must still recompute
        alike; whether it does, a region's first forward tells.
        """
        if self.regathers or region.communicates:
            return False
        return region.seen or not (dist.is_initialized() and dist.get_world_size() > 1)

    def worth_swapping(self, tensor: torch.Tensor) -> bool:
        """Large enough, on this device, and laid out so that rows travel as they lie."""
        return (
            is_plain(type(tensor))
            and tensor.device.type == self.device.kind
            and tensor.numel() * tensor.element_size() >= max(1, self.min_offload_bytes)
            and swappable(tensor)
        )

    def swap_input(self, value: torch.Tensor, later: bool) -> Swapped | None:
        """Start a region input on its way to the host, whole, now or `later`; a neighbour region's copy of the same
        tensor is shared. None: the host is full.
        """
        for reference in self._resident:
            frame = reference()
            for part in frame.inputs if frame is not None else ():
                if (
                    isinstance(part, Swapped)
                    and part.tensor is not None
                    and part.resident
                    and part.version == value._version
                ):
                    same = (part.size, part.stride, part.dtype) == (value.shape, value.stride(), value.dtype)
                    if same and storage_of(part.tensor) == storage_of(value):
                        return part
        return self.transfer.offload(value, value.shape[0], later)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operators inside are not the region's own: neither noted nor replayed (parameter gathering, hooks)."""
        known = core()
        if known is None:
            yield
            return
        known.pause()
        try:
            yield
        finally:
            known.resume()

    def note(self, frame: Frame) -> None:
        """A frame's forward is over."""
        self.in_flight.over(frame)
        self.largest_region_bytes = max(self.largest_region_bytes, frame.saved_bytes)
        self.largest_saved_bytes = max(self.largest_saved_bytes, frame.largest_saved_bytes)
        if frame.opaque and not (frame.region.opaque and frame.region.seen):
            self._note_opaque(frame)
        frame.region.ran(frame)
        self.strayed += frame.records is not frame.region.planned_from and not frame.opaque
        if not frame.region.lingers:
            self.expect(frame.region)
        if self.on_frame is not None:
            self.on_frame(frame)

    def expect(self, region: Region) -> None:
        """A forward sends its tensors to the host, as far as the plan says."""
        self.expected_bytes += region.forward_bytes or 0
        self.unplanned += region.forward_bytes is None

    def pump(self, frame: Frame) -> None:
        """Fetch what backward needs next, this frame's tensors first, as far ahead as the limit of bytes allows."""
        self.in_flight.settle()
        if not self.ledger.waiting:
            return
        pending_bytes = 0
        ahead: Frame | None = frame
        while ahead is not None:
            while ahead.todo:
                part = ahead.todo[-1]
                if part.tensor is None:
                    if ahead is not frame and self.held_bytes() + pending_bytes + part.nbytes > self.limit_bytes:
                        return
                    self.transfer.prefetch(part)
                ahead.todo.pop()
                self.ledger.waiting -= 1
            pending_bytes += ahead.pending_bytes
            ahead = ahead.previous() if ahead.previous is not None else None

    @property
    def limit_bytes(self) -> int:
        """How many bytes of saved tensors may be on the device, so that the peak is that of full recomputation.

        Full recomputation holds one region's saved tensors at once, and every region's input. It has let some of the
        former go by the time backward's own temporaries are there: three gradients as large as the largest of them.
        """
        return self.largest_region_bytes + self.in_flight.peak_input_bytes - TEMPORARIES * self.largest_saved_bytes

    def held_bytes(self) -> int:
        """Bytes of saved tensors on the device: captured and not let go, fetched, recomputed, or with autograd."""
        transfer, ledger = self.transfer, self.ledger
        return transfer.resident_bytes + transfer.fetched_bytes + ledger.recomputed_bytes + ledger.lent_bytes()

    def trim(self, frame: Frame) -> None:
        """Let the oldest resident regions go where captured tensors exceed the limit, which one region's run tells."""
        if not self.largest_region_bytes:
            return
        while len(self._resident) > 1 and self.held_bytes() + frame.pending_bytes > self.limit_bytes:
            oldest = self._resident.popleft()()
            if oldest is not None:
                oldest.release()

    def diverged(self, region: Region, how: str) -> None:
        """A recompute pass ran other operators than its forward: it is done again in full, without captured outputs."""
        self.divergences += 1
        if self.divergences == 1:
            log.warning("memplug: region %s is recomputed in full: %s", region.name, how)

    def close(self) -> None:
        """Wait for all copies and give back the host memory. Graphs still in flight can no longer run backward."""
        self.transfer.close()

    def _is_captured(self) -> bool:
        """Whether a CUDA graph is being captured: its replays would write to host rows that are others' by then."""
        if not self.device.is_capturing():
            return False
        if not self._told_of_capture:
            self._told_of_capture = True
            log.warning(
                "memplug: regions inside of a CUDA graph run as they are: nothing of them is swapped or recomputed"
            )
        return True

    @property
    def opaque_regions(self) -> int:
        """How many regions no tape tells of."""
        return self.opaque.total()

    def _note_opaque(self, frame: Frame) -> None:
        region = frame.region
        region.opaque = region.opaque or reasons(frame.native.opaque)
        self.opaque[region.opaque] += 1
        if self.opaque_regions == 1:
            log.warning(
                "memplug: region %s is opaque (%s): its input is swapped, all else is recomputed by running its module",
                region.name,
                region.opaque,
            )

    def _make_room(self) -> None:
        while len(self._resident) >= RESIDENT_REGIONS:
            frame = self._resident.popleft()()
            if frame is not None:
                frame.release()

    def _warn_if_full(self) -> None:
        if self.transfer.refused and not self._warned:
            self._warned = True
            log.warning(
                "memplug: the host budget of %.2f GiB is used up: later regions swap fewer rows and recompute more",
                self.pool.budget_bytes / 2**30,
            )
