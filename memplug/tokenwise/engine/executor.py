"""Runs regions: MEMO's token-wise swapping and recomputation (section 4.1), with a decision for each operator.

Any module can be a region. Its forward runs once under an observer that captures expensive outputs and offloads their
first rows. When the second region after it starts (`buffers` sets this number), the executor waits for these copies and
releases the outputs' memory. This rule takes the place of MEMO's two rounding buffers in forward, where operators
allocate their own outputs. In backward, rows are prefetched ahead of their use:

* into rounding buffers (native/transfer/rounding.h), if any are reserved (`memplug.tokenwise.rounding`), as far ahead
  as the buffers have room;
* otherwise into new memory, within a limit that keeps the peak at that of full recomputation. The limit is the bytes of
  the largest region's saved tensors plus the bytes of all regions' inputs: full recomputation has both on the device.

All code that runs once per tensor is native: native/tape/frame.h, flow.h and transfer.h.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from memplug.device.device import Device
from memplug.device.host_pool import HostPool
from memplug.errors import InPlaceError, MemplugError, RecomputeError, coded
from memplug.sizes import GIB
from memplug.tokenwise.engine.as_they_are import AsTheyAre
from memplug.tokenwise.engine.buffers import IN_PLACE, Buffers
from memplug.tokenwise.engine.calls import ExecutorCalls
from memplug.tokenwise.engine.core import core, watching
from memplug.tokenwise.engine.hidden import HiddenFunctions
from memplug.tokenwise.engine.hooks import EngineHooks
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.engine.rerun import as_before, rerun
from memplug.tokenwise.engine.state import CallState
from memplug.tokenwise.engine.tape import Tape, named
from memplug.tokenwise.engine.times import Times
from memplug.tokenwise.engine.units import run_again
from memplug.tokenwise.engine.watch import AddressMode

log = logging.getLogger("memplug")

_REFUSED_BY_TORCH = "don't yet support saved tensor hooks"


class _OfThread(threading.local):
    recomputing = 0
    unit_states: Mapping[Any, collections.deque[Any]] = {}


class _Rerunning:
    """The context in which a unit or module runs again.

    Written as a class, since every rerun of a unit enters it: a generator's context manager takes five times as long.
    """

    def __init__(self, threads: _OfThread, unit_states: Mapping[Any, collections.deque[Any]]):
        self._threads, self._unit_states = threads, unit_states

    def __enter__(self) -> None:
        threads = self._threads
        threads.unit_states, self._unit_states = self._unit_states, threads.unit_states
        threads.recomputing += 1

    def __exit__(self, *error: object) -> None:
        threads = self._threads
        threads.recomputing -= 1
        threads.unit_states = self._unit_states


class Executor(ExecutorCalls):
    """Runs regions.

    Args:
        device: the device that trains.
        host_budget_bytes: limit of the pinned pool.
        min_offload_bytes: smaller tensors stay on the device.
        regathers: whether forward gathers parameters (ZeRO 3). If so, every region runs its recompute pass on every
            rank, however much is swapped.
        buffers: number of regions whose captured tensors may be on the device at a time in forward. It is also the
            number of rounding buffers that `flow.reserve` makes.
        hooks: functions of the session and of frameworks, for the executor to call.

    Attributes:
        pool: pinned host memory.
        transfer: copies between device and host, and their counters (native/transfer/transfer.h).
        flow: frames in flight, in order (native/transfer/flow.h). Its `share` scales the rows that regions swap; the
            share is below 1 once host memory has run out.
        on_timed: the listener of `time_forwards`.
        divergences: number of recompute passes that fell back to running all operators of a region.
        opaque: number of opaque regions, by reason.
    """

    def __init__(
        self,
        device: Device,
        host_budget_bytes: int,
        min_offload_bytes: int = 1 << 20,
        regathers: bool = False,
        buffers: int = 2,
        hooks: EngineHooks | None = None,
    ):
        self.device = device
        self.hooks = hooks or EngineHooks()
        self.buffers = buffers
        self.regathers = regathers
        self.core = core()
        self.pool = HostPool(device, host_budget_bytes, self.core)
        self.transfer = self.core.Transfer(device.streams(self.core), self.pool.rows)
        self.flow = self.core.Flow(self.transfer, str(device.torch_device), min_offload_bytes, buffers, regathers)
        self._threads = _OfThread()
        self.functions = HiddenFunctions(self)
        self.divergences = 0
        self.opaque: collections.Counter[str] = collections.Counter()
        self.on_timed: Callable[[Region, Any, Tape], None] | None = None
        self._warned = False
        self._as_they_are = AsTheyAre(device)
        watching().begin()
        self._stop_watching = weakref.finalize(self, watching().end)  # also runs if `close` is never called
        self._stop_watching.atexit = False

    @property
    def runs_regions(self) -> bool:
        """Return whether a forward with gradients would run as a region now: see `AsTheyAre`."""
        return not self._as_they_are.is_so()

    def time_forwards(self, listener: Callable[[Region, Any, Tape], None] | None) -> None:
        """Take device times around every operator of all regions, from the next forward on.

        Args:
            listener: gets each timed region with its frame and tape; None: stop taking times.
        """
        self.on_timed = listener

    @property
    def recomputing(self) -> int:
        """Return the number of nested reruns of modules and units on this thread."""
        return self._threads.recomputing

    def rerunning(self, unit_states: Iterable[tuple[Any, Any]] = ()) -> AbstractContextManager[None]:
        """Return a context in which a module or a unit runs again.

        Args:
            unit_states: (unit, state) of each unit inside of the module, in the order in which they run.
        """
        by_unit: dict[Any, collections.deque[Any]] = {}
        for unit, state in unit_states:
            by_unit.setdefault(unit, collections.deque()).append(state)
        return _Rerunning(self._threads, by_unit)

    def next_state(self, unit: Any) -> Any:
        """Return the state for the next rerun of this unit; None if the forward did not run the unit."""
        states = self._threads.unit_states.get(unit)
        return states.popleft() if states else None

    def run(self, region: Region, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call(*args, **kwargs)`, the region's own forward.

        Without gradients the call runs unobserved.
        """
        if not torch.is_grad_enabled() or self._as_they_are.is_so():
            return call(*args, **kwargs)
        if region.is_plain:
            given_bytes = self.core.given_bytes(args, kwargs)
            if self._runs_plain(region, given_bytes):
                region.native.note_given(given_bytes)
                return call(*args, **kwargs)
            self.hooks.on_larger()
        try:
            if self.hooks.around:
                with self.standing_around("forward", region):
                    out = self._observe(region, call, args, kwargs)
            else:
                out = self._observe(region, call, args, kwargs)
        except torch.OutOfMemoryError as error:
            self.hooks.explain("forward", region, error)
            raise
        except RuntimeError as error:
            if _REFUSED_BY_TORCH in str(error) and hasattr(error, "add_note"):
                error.add_note(
                    f"memplug: region {region.name} runs under saved-tensor hooks and takes gradients by a function "
                    'transform: use torch.autograd.grad there, or leave the module out of "tokenwise.regions"'
                )
            raise
        if not self._warned and self.transfer.refused:
            self._warn_full()
        return out

    def _runs_plain(self, region: Region, given_bytes: int) -> bool:
        """Return whether a plain region runs as without memplug with arguments of this size.

        With larger arguments than in the step that the plan was made from, the region would keep more than planned, so
        it runs through memplug. The exception is a region whose recompute passes launch collectives: it runs plain with
        any arguments, since all ranks must launch the same collectives.
        """
        return given_bytes <= region.setting.plain_bytes or self.regathers or region.native.communicates

    def _observe(self, region: Region, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a region's forward under the observer.

        The native core notes every operator and every tensor that autograd saves (native/tape/forward.h), or verifies
        that they are those of an earlier forward's tape. Captured outputs are offloaded (native/tape/frame.h).

        Autograd gets a small object instead of each saved tensor. The tensor is restored in one of three ways:

        * It was held: it existed before the region, like a parameter or a mask.
        * It is a view: a capture has all of the tensor's storage.
        * A recompute pass makes it: the pass runs those operators of the tape that the saved tensors depend on,
          starting from captured outputs.

        The tape of an opaque forward does not show everything that the forward did. So the region's input is swapped,
        and its recompute pass runs the module again. The exception is a region that communicates: it may be opaque on
        this rank alone, so all tensors that it saves stay on the device.
        """
        times = Times(self.device) if self.on_timed is not None else None
        surroundings = [take() for take in self.hooks.surroundings]
        run = functools.partial(self.flow.run, region.native, self, region, times, surroundings)
        if region.native.repeats:
            return run(None, call, args, kwargs)
        state = _state_before(region, call, args, kwargs)
        with AddressMode(self.core):
            return run(state, call, args, kwargs)

    @contextlib.contextmanager
    def standing_around(self, phase: str, region: Region) -> Iterator[None]:
        """Enter the contexts that frameworks need around a region's forward or recompute pass."""
        with contextlib.ExitStack() as stack:
            for context in self.hooks.around:
                stack.enter_context(context(phase, region))
            yield

    # -- calls of the native core: native/tape/calls.h --------------------------------------------------------------

    written_buffers = Buffers
    run_unit_again = run_again

    @property
    def stands_around(self) -> bool:
        """Return whether a recompute pass needs `restore`: see `ExecutorCalls.stands_around`."""
        return bool(self.hooks.around) or self.regathers

    def is_scratch(self, tensor: torch.Tensor) -> bool:
        """Return whether a framework owns the tensor as scratch memory: see `ExecutorCalls.is_scratch`."""
        return any(holds(tensor) for holds in self.hooks.scratch)

    def explain(self, phase: str, region: Region, error: BaseException) -> None:
        """Pass an out-of-memory error on to the session: see `ExecutorCalls.explain`."""
        self.hooks.explain(phase, region, error)

    @staticmethod
    def with_region(region: Region, error: RuntimeError) -> RuntimeError:
        """Return the error for backward to raise.

        If a tensor was modified in place, the error names the region and gives advice.
        """
        if IN_PLACE not in str(error) or isinstance(error, MemplugError):
            return error
        named = InPlaceError(
            f"region {region.name}: {error}",
            "Between a forward with gradients and its backward, write to nothing that the forward read, such as a "
            "parameter, a buffer or a static key-value cache: give the other code a copy, or run backward first.",
            code="MP024",
        )
        return named.with_traceback(error.__traceback__)

    def is_alone(self) -> bool:
        """Return whether there is only one rank: see `ExecutorCalls.is_alone`."""
        return not (dist.is_initialized() and dist.get_world_size() > 1)

    def note_opaque(self, region: Region, why: int | str, why_it_keeps: str = "") -> None:
        """Note that a region is opaque, and warn once: see `ExecutorCalls.note_opaque`."""
        if not isinstance(why, str):
            if self.functions.found_some():
                return  # the functions that made it opaque are units from the next forward on
            why = named(why)
        region.opaque = region.opaque or why
        self.opaque[region.opaque] += 1
        if self.opaque_regions == 1:
            log.warning(
                coded("MP020", "memplug: region %s is opaque (%s): %s"),
                region.name,
                region.opaque,
                f"{why_it_keeps}, so that all that it saves stays on the device"
                if why_it_keeps
                else "its input is swapped, all else is recomputed by running its module",
            )

    def note_timed(self, region: Region, frame: Any) -> None:
        """Give a timed forward to the listener: see `ExecutorCalls.note_timed`."""
        tape = frame.times.close(frame)
        if self.on_timed is not None:
            self.on_timed(region, frame, tape)

    def restore(self, frame: Any, region: Region) -> None:
        """Run a frame's recompute pass from Python: see `ExecutorCalls.restore`."""
        tape = frame.times.tape if frame.times is not None else None
        with self.standing_around("recompute", region):
            frame.forget()
            begin = self.device.stamp() if tape is not None else None
            if frame.is_opaque and not frame.keeps:
                rerun(self, frame, region)
            else:
                self._replay(frame, region)
            frame.is_restored = True
            if tape is not None:
                tape.recompute_span = (begin, self.device.stamp())

    def _replay(self, frame: Any, region: Region) -> None:
        def replay() -> None:
            try:
                with contextlib.ExitStack() as stack:
                    for context in self.hooks.gathered:
                        stack.enter_context(context(region))
                    stack.enter_context(as_before(frame.buffers))
                    frame.replay()
            except self.core.GroupGone as collective:
                raise RecomputeError(
                    f"region {region.name}: the process group of {collective} was destroyed before backward, which "
                    "launches that collective again",
                    "Destroy process groups after the last backward.",
                ) from None

        try:
            replay()
        except self.core.Diverged as divergence:
            launches = frame.has_launches  # whether captured results replace collectives
            if not launches:
                frame.decide({}, [])  # substitute nothing: the next pass runs all operators
                launches = frame.communicates
            if launches:  # a full pass would launch collectives that other ranks do not launch
                raise RecomputeError(f"region {region.name}: {divergence}", code="MP021") from None
            self.divergences += 1
            if self.divergences == 1:
                text = "memplug: region %s is recomputed in full, which is slower but equally correct: %s"
                log.warning(coded("MP021", text), region.name, str(divergence))
            self._replay_in_full(region, replay)

    def _replay_in_full(self, region: Region, replay: Callable[[], None]) -> None:
        try:
            replay()
        except self.core.Diverged as divergence:
            raise RecomputeError(f"region {region.name}: {divergence}", code="MP021") from None

    def close(self) -> None:
        """Wait for all copies and release the host memory.

        Graphs still in flight can no longer run backward.
        """
        for added in (self.hooks.around, self.hooks.gathered, self.hooks.surroundings, self.hooks.scratch):
            added.clear()  # frameworks have added these functions
        self.transfer.close()
        self.pool.close()
        self._stop_watching()

    @property
    def opaque_regions(self) -> int:
        """Return how many regions are opaque."""
        return self.opaque.total()

    def _warn_full(self) -> None:
        self._warned = True
        text = (
            "memplug: the host budget of %.2f GiB is used up: later regions swap fewer rows and recompute more. "
            'Raise "host_budget_gib" if the host has more'
        )
        log.warning(coded("MP017", text), self.pool.budget_bytes / GIB)


def _state_before(region: Region, call: Callable[..., Any], args: Any, kwargs: Any) -> CallState:
    """Return the Python state before a forward that may be opaque."""
    if region.unknown_state is not None:
        return region.unknown_state
    state = CallState.of(call, args, kwargs)
    if state.unknown:
        region.unknown_state = state
    return state
