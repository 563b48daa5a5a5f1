"""The planned arena: memory that is reserved once, from which training is served at planned addresses; the façade over
the native arena (STWeaver, section 6).

The native core stands in front of the device's allocator, and asks the arena first. What the arena has no bytes for,
and all that it is not meant for, the native allocator gets as if nothing stood in front of it. There is one arena in a
process, since allocators are the process's; a session that has the recorder has the arena too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection
from typing import Protocol

import torch

from memplug import native
from memplug.arena.tables import Tables
from memplug.errors import ArenaError
from memplug.profile.records import Pass
from memplug.sizes import GIB


class Counters(Protocol):
    """What an arena did since it was made, and holds now; requests, and bytes as asked for unless said otherwise.

    Attributes:
        planned, planned_bytes: served at their planned addresses.
        dynamic, dynamic_bytes: served from their group's reusable space.
        reusable, reusable_bytes: served from other reusable space: for validations, or because the address was in use.
        unplanned: left to the native allocator: the plan has no such request,
        occupied: its address was still in use,
        dynamic_missed: or its group's reusable space had no room,
        without_gradients: or it is a validation's, and no reusable space was large enough.
        fallback_bytes: of those four.
        lasting, lasting_bytes: left to the native allocator: what such a request gets outlives its step.
        elsewhere: likewise, of threads that do not train, and of passes that were withheld.
        written_freed: blocks that were written to after they had been given back, in the mode that checks,
        written_beyond: or beyond their end.
        reserved_bytes: now, with what is still in use of earlier plans.
        leftover_bytes: now, held by blocks of earlier steps in the part that is used again and again, and in the annex.
        live_bytes, peak_bytes: in use now, and the most since the last plan.
        live_size, peak_size: likewise, rounded up to what they occupy.
        from_arena: that the arena had bytes for.
        fallback: of threads that train, that the native allocator served.
        mismatched: that a plan of this program would have had an address for.
    """

    planned: int
    planned_bytes: int
    dynamic: int
    dynamic_bytes: int
    reusable: int
    reusable_bytes: int
    unplanned: int
    occupied: int
    dynamic_missed: int
    without_gradients: int
    fallback_bytes: int
    lasting: int
    lasting_bytes: int
    elsewhere: int
    written_freed: int
    written_beyond: int
    reserved_bytes: int
    leftover_bytes: int
    live_bytes: int
    live_size: int
    peak_bytes: int
    peak_size: int
    from_arena: int
    fallback: int
    mismatched: int

    def since(self, before: Counters) -> Counters:
        """Returns what happened since then, beside what is held now."""


class Arena:
    """Serves nothing until `serve`.

    Args:
        device: whose memory it is: the CPU, a CUDA device or the virtual one.
        checks: look after freed bytes and what follows each block: for finding writes that do not belong there.

    Raises:
        NativeError: the native core cannot be built here.
        ArenaError: this device's allocator cannot be stood in front of, or another device of this process has one.
    """

    def __init__(self, device: torch.device | str, checks: bool = False):
        self.device = torch.device(device)
        self._native = native.load()
        kind = self.device.type
        if kind == "cuda":
            _check_cuda(self._native)
        name = kind if kind in ("cuda", "cpu") else "other"
        self._stand_in_front = getattr(self._native, f"stand_before_{name}")
        index = torch.cuda.current_device() if kind == "cuda" and self.device.index is None else self.device.index or 0
        try:
            self._native.open_arena(kind, index, checks)
        except RuntimeError as error:
            raise ArenaError(f"there can be no planned arena: {_first_line(error)}", code="MP006") from None
        self._leave: weakref.finalize | None = None  # while it serves, for a session that is never detached

    def serve(self, tables: Tables) -> None:
        """Serve by this plan from the next step on; what another one handed out stays valid.

        Memory that the native allocator caches is given back first, so that both fit.

        Raises:
            ArenaError: there is not as much memory, or another library changed the device's allocator; nothing is
                served then.
        """
        if self.device.type != "cpu" and not self.serving:
            torch.get_device_module(self.device).empty_cache()
        if self._leave is None:  # before it reserves memory, which counts as none that training has in use
            try:
                self._stand_in_front(True)
            except RuntimeError as error:
                self._native.close_arena()
                raise ArenaError(f"there can be no planned arena: {_first_line(error)}", code="MP006") from None
            self._leave = weakref.finalize(self, _leave, self._native, self._stand_in_front)
            self._leave.atexit = False
        try:
            self._native.load_arena(
                tables.requests.tobytes(),
                tables.slots.tobytes(),
                tables.dynamic.tobytes(),
                tables.spaces.tobytes(),
                list(map(int, tables.crosses)),
                list(map(int, tables.reusable)),
                tables.reused_bytes,
                tables.kept_bytes,
                tables.streams,
            )
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is one
            self.close()
            self._native.close_arena()
            needed_gib = (tables.reused_bytes + tables.kept_bytes) / GIB
            raise ArenaError(
                f"{needed_gib:.2f} GiB for the arena cannot be reserved: {_first_line(error)}",
                'Lower "device_budget_gib", so that less is kept on the device; or set "arena": {"enabled": false}, '
                "which leaves all memory to torch's own allocator.",
            ) from None

    @property
    def serving(self) -> bool:
        """Whether there is a plan to serve by: from `serve` to `close`."""
        return self._leave is not None

    def begin_step(self, withheld: Collection[Pass] = ()) -> None:
        """The program begins anew: the first request of each place is expected next. Serves from here on.

        Args:
            withheld: passes of this step whose requests are left to the native allocator.
        """
        if self.serving:
            self._native.begin_arena_step(sum(1 << each for each in withheld))

    def end_step(self) -> None:
        """Serves nothing until the next step begins: what is asked for between two steps is no part of the program."""
        if self.serving:
            self._native.end_arena_step()

    def leftovers(self) -> list[tuple[int, int]]:
        """Returns the bytes [begin, end) of the part that is used again and again that blocks of earlier steps hold."""
        return self._native.arena_leftovers() if self.serving else []

    def extend(self, nbytes: int) -> bool:
        """Reserve an annex in place of the former one, for requests whose bytes leftovers hold; of 0 bytes: none.

        Called between two steps.

        Returns:
            False: there is not as much memory, and no annex now.
        """
        try:
            self._native.extend_arena(nbytes)
        except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is one
            return False
        return True

    def late(self) -> list[tuple[int, int]]:
        """Requests of the plan, by their index, whose blocks were still in use when the plan had their bytes for
        another one; and that one.
        """
        return self._native.late_requests() if self.serving else []

    def close(self) -> None:
        """Serve nothing any more, and give back what is not in use: the rest follows when its last block does. A second
        call does nothing.
        """
        if self._leave is not None:
            self._leave()
            self._leave = None

    def counters(self) -> Counters:
        """See `Counters`."""
        return self._native.arena_counters()

    def native_bytes(self) -> int | None:
        """Bytes in use now that are not of the arena; None on the CPU, whose allocator does not count."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.memory_allocated(self.device) - self.counters().live_size


def _leave(core: object, stand_in_front: Callable[[bool], None]) -> None:
    """Memory that is not in use goes back, and the allocator is torch's own again: on CUDA with the last block."""
    core.close_arena()
    stand_in_front(False)


def _check_cuda(core: object) -> None:
    torch.cuda.init()  # before it, the allocator has no devices to listen to
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise ArenaError(
            f"there can be no planned arena in front of torch's allocator {backend}",
            'Take "backend:cudaMallocAsync" out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, or set "arena": '
            '{"enabled": false}.',
            code="MP006",
        )
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "roundup_power2_divisions" in os.environ.get(variable, ""):
            raise ArenaError(
                f"{variable} rounds large requests up (roundup_power2_divisions), and the arena is the largest",
                "Take that out: with the arena nothing is left to round. Expandable segments and the garbage "
                "collection threshold may stay.",
                code="MP006",
            )
    if not hasattr(core, "stand_before_cuda"):
        raise ArenaError(
            f"the native core was built without the arena for CUDA, whose interface torch {torch.__version__} changed",
            'Install another version of torch, or set "arena": {"enabled": false}.',
            code="MP006",
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
