"""Row-cached recompute over rounding buffers: MEMO's token-wise swapping and recomputation, at the operator level
(MEMO, section 4.1).

Any module can be a region. Its forward runs once under an observer that captures expensive outputs and sends their
first rows to the host; the region two further on waits for those copies and releases the memory (two rounding buffers,
by reference). In backward, rows are prefetched within a limit of bytes that keeps the peak at full recomputation's:
what is restored at any time is at most the largest region's saved tensors, which full recomputation has there too, plus
the region inputs, which it never releases. What runs once a tensor is native: memplug/native/frame.h, flow.h and
transfer.h.
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

from memplug.execute.arguments import flatten, tensor_bytes
from memplug.execute.core import core
from memplug.execute.device import Device
from memplug.execute.frame import Frame
from memplug.execute.host_pool import HostPool
from memplug.execute.region import Region
from memplug.execute.replayed import Replayed
from memplug.execute.tape import Tapes, reasons
from memplug.execute.unobserved import Copies, Copy, Unobserved

log = logging.getLogger("memplug")


class _OfThread(threading.local):
    newest: weakref.ref[Frame] | None = None
    recomputing = 0


class Executor:
    """Runs regions.

    Args:
        device: where the training runs.
        host_budget_bytes: bound of the pinned pool.
        min_offload_bytes: smaller tensors stay on the device.
        regathers: parameters are gathered in forward (ZeRO 3): every region recomputes on every rank, whatever is
            swapped.

    Attributes:
        pool: pinned host memory.
        transfer: copies between device and host, and their counters (memplug/native/transfer.h).
        flow: frames in flight, in order (memplug/native/flow.h).
    """

    def __init__(
        self, device: Device, host_budget_bytes: int, min_offload_bytes: int = 1 << 20, regathers: bool = False
    ):
        self.device = device
        self.min_offload_bytes = min_offload_bytes
        self.regathers = regathers
        self.pool: Any
        self.transfer: Any
        self.flow: Any
        self.swapped_type: type
        known = core()
        if known is None:
            self.pool = self.transfer = self.flow = Copies(host_budget_bytes)
            self.swapped_type = Copy
        else:
            self.pool = HostPool(device, host_budget_bytes, known)
            self.transfer = known.Transfer(device.streams(known), self.pool.rows)
            self.flow = known.Flow(self.transfer, device.kind, min_offload_bytes)
            self.swapped_type = known.Swapped
        self.tapes = Tapes()
        self._threads = _OfThread()
        self.timing = False
        self.divergences = 0
        self.strayed = 0  # forwards that did something else than the one that their plan was made from
        self.opaque: collections.Counter[str] = collections.Counter()  # regions by the reason
        # around a region's forward and recompute: (phase, region) -> context manager
        self.guard: Callable[[str, Region], Any] = lambda phase, region: contextlib.nullcontext()
        # around a recompute pass that runs operators alone: a framework gathers the region's parameters
        self.gathered: Callable[[Region], Any] = lambda region: contextlib.nullcontext()
        # the framework's states that random operators depend on, see `Ambient`
        self.surroundings: list[Callable[[], Callable[[], Any]]] = []
        # scratch buffers owned by the framework: never captured or restored
        self.is_scratch: Callable[[torch.Tensor], bool] = lambda tensor: False
        self.on_frame: Callable[[Frame], None] | None = None  # the profile listens here
        self.on_plain: Callable[[int], None] = lambda given_bytes: None  # and here
        # `with executor.own:` around operators that are no part of the program, for whoever watches it
        self.own: Any = contextlib.nullcontext()
        self._warned = False
        self._told_of_capture = False

    @property
    def share(self) -> float:
        """Of the rows that regions say, that are swapped: less where host memory has run out."""
        return self.flow.share

    @share.setter
    def share(self, share: float) -> None:
        self.flow.share = share

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
        if region.plain_bytes is not None and self._runs_plain(region, args, kwargs):
            return call(*args, **kwargs)
        with self.guard("forward", region):
            with self.own:
                frame = self._frame(region, call, args, kwargs)
            out = frame.forward(args, kwargs)
        self._warn_if_full()
        return out

    def _runs_plain(self, region: Region, args: Any, kwargs: Any) -> bool:
        """Not where it is given more than in the step that the plan was made from: it would keep more too. But all
        ranks must launch the same collectives, however much each is given.
        """
        flat: list[Any] = []
        flatten((args, kwargs), flat)
        given_bytes = tensor_bytes(flat)
        if given_bytes > region.plain_bytes and not (self.regathers or region.communicates):
            return False
        self.on_plain(given_bytes)
        return True

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
        if frame.opaque and not (frame.region.opaque and frame.region.seen):
            self._note_opaque(frame)
        frame.region.ran(frame)
        self.strayed += frame.records is not frame.region.planned_from and not frame.opaque
        if self.on_frame is not None:
            self.on_frame(frame)

    def diverged(self, region: Region, how: str) -> None:
        """A recompute pass ran other operators than its forward: it is done again in full, without captured outputs."""
        self.divergences += 1
        if self.divergences == 1:
            log.warning("memplug: region %s is recomputed in full: %s", region.name, how)

    def close(self) -> None:
        """Wait for all copies and give back the host memory. Graphs still in flight can no longer run backward."""
        self.transfer.close()
        self.pool.close()

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

    def _warn_if_full(self) -> None:
        if self.transfer.refused and not self._warned:
            self._warned = True
            log.warning(
                "memplug: the host budget of %.2f GiB is used up: later regions swap fewer rows and recompute more",
                self.pool.budget_bytes / 2**30,
            )
