"""The planned arena: reserved memory that serves a training step at planned addresses (STWeaver, section 6).

`Arena` wraps the native arena. The native core stands in front of the device's allocator and offers each request to
the arena first. A request that the arena does not serve goes to torch's own allocator, as without memplug. A process
has one arena, since allocators belong to the process; the session that owns the recorder owns the arena too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection
from typing import Protocol

import torch

from memplug import native
from memplug.arena.tables import MARGIN_BYTES, ArenaTables
from memplug.errors import ArenaError
from memplug.profile.records import Pass
from memplug.profile.scaling import Inputs
from memplug.sizes import GIB


class Counters(Protocol):
    """Counts since the arena was made, and memory held now.

    Unless said otherwise, an attribute counts requests, or bytes as requested.

    Attributes:
        planned, planned_bytes: served at their planned addresses.
        dynamic, dynamic_bytes: served from their group's reusable space; for groups, see `plan.part.DynamicSpace`.
        reusable, reusable_bytes: served from other reusable space or the annex: requests of validations or between two
            passes, planned requests whose address was in use, and those counted in `exceeding`.
        exceeding: served from reusable space, although not in the plan, since a pass had larger inputs than planned.
        unplanned: left to torch's allocator because the plan has no such request.
        occupied: left to torch's allocator because the planned address was still in use.
        dynamic_missed, dynamic_missed_bytes: left to torch's allocator because their group's space had no room.
        dynamic_missed_largest: bytes of the largest of these requests in the current step.
        without_gradients: left to torch's allocator because a validation made them and no reusable space was large
            enough.
        fallback_bytes: bytes of the requests in the four counts above.
        lasting, lasting_bytes: left to torch's allocator because their blocks outlive the step.
        elsewhere: left to torch's allocator because they came from a thread that does not train, or in a pass that
            `Arena.begin_step` withholds.
        written_freed: blocks that were written to after they had been freed; counted only by an arena with `checks`.
        written_beyond: blocks that were written to beyond their end; counted only by an arena with `checks`.
        reserved_bytes: memory reserved now, including memory of earlier plans that is still in use.
        leftover_bytes: bytes of leftovers that have been in use for a whole step and still are, in the annex and in the
            reused part (the arena's memory for a step's blocks).
        live_bytes, peak_bytes: bytes of blocks in use now, and the most since the last plan was loaded.
        live_size, peak_size: the same, with each block rounded up to the bytes that it occupies.
        from_arena: requests that the arena served.
        fallback: requests in the four counts above `fallback_bytes`.
        mismatched: requests that fell back because the plan does not fit: `unplanned` and `occupied`.
    """

    planned: int
    planned_bytes: int
    dynamic: int
    dynamic_bytes: int
    reusable: int
    reusable_bytes: int
    exceeding: int
    unplanned: int
    occupied: int
    dynamic_missed: int
    dynamic_missed_bytes: int
    dynamic_missed_largest: int
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
        """Return the counts since `before`; current values, such as `live_bytes`, stay as they are."""


class Arena:
    """The façade over the native arena; inactive until `serve` is called.

    Args:
        device: the device whose memory it serves: the CPU, a CUDA device or the virtual device.
        checks: watch freed bytes and the margin after each block, to find stray writes.

    Raises:
        NativeError: the native core cannot be built here.
        ArenaError: memplug cannot stand in front of this device's allocator, or another device of this process has
            the arena.
    """

    def __init__(self, device: torch.device | str, checks: bool = False):
        self.device = torch.device(device)
        self.margin_bytes = MARGIN_BYTES if checks else 0
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
        self._loaded: dict[int, ArenaTables] = {}  # the plans that the native arena has, by number
        # undoes `serve`: `close` calls it, or Python when it collects this object; None: no plan is loaded
        self._leave: weakref.finalize | None = None

    def serve(self, tables: ArenaTables) -> bool:
        """Serve this plan from the next request on; blocks of earlier plans stay valid.

        Plans that the arena has served since `close` stay loaded, and share its memory: turning to one of them costs
        nothing. If the arena does not serve yet, torch first releases its cached memory, to make room. If the arena
        gets other memory than it had, torch then releases what it had, which would lie idle among its cached memory.

        Returns:
            False if the plan was loaded already.

        Raises:
            ArenaError: the device has too little memory, or another library changed its allocator. The arena then
                serves nothing.
        """
        if id(tables) in self._loaded and self._native.turn_arena(id(tables)):
            return False
        before = self.counters().reserved_bytes if self.serving else None
        if before is None:
            self._empty_cache()
        # This comes before `load_arena`, so that the arena's memory does not count as in use by training.
        if self._leave is None:
            try:
                self._stand_in_front(True)
            except RuntimeError as error:
                self._native.close_arena()
                raise ArenaError(f"there can be no planned arena: {_first_line(error)}", code="MP006") from None
            self._leave = weakref.finalize(self, _leave, self._native, self._stand_in_front)
            self._leave.atexit = False
        try:
            self._native.load_arena(
                id(tables),
                tables.requests.tobytes(),
                tables.slots.tobytes(),
                tables.dynamic.tobytes(),
                tables.spaces.tobytes(),
                list(map(int, tables.crosses)),
                list(map(int, tables.ceilings)),
                list(map(int, tables.reusable)),
                list(map(list, tables.terms)),
                tables.reused_bytes,
                tables.kept_bytes,
                tables.streams,
            )
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            self.close()
            self._native.close_arena()
            needed_gib = (tables.reused_bytes + tables.kept_bytes) / GIB
            raise ArenaError(
                f"{needed_gib:.2f} GiB for the arena cannot be reserved: {_first_line(error)}",
                'Lower "device_budget_gib", so that less is kept on the device; or set "arena": {"enabled": false}, '
                "which leaves all memory to torch's own allocator.",
            ) from None
        self._loaded[id(tables)] = tables
        if before not in (None, self.counters().reserved_bytes):
            self._empty_cache()
        return True

    def unload(self, tables: ArenaTables) -> None:
        """Forget a plan that requests are not served by, so that later plans need less memory."""
        if self._loaded.pop(id(tables), None) is not None:
            self._native.unload_arena(id(tables))

    def is_largest(self, tables: ArenaTables) -> bool:
        """Return whether no other loaded plan needs more memory than this one."""
        return all(each.reused_bytes <= tables.reused_bytes for each in self._loaded.values())

    def _empty_cache(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    @property
    def serving(self) -> bool:
        """Return whether a plan is loaded: true from `serve` until `close`."""
        return self._leave is not None

    def begin_step(self, withheld: Collection[Pass] = ()) -> None:
        """Start serving a step: each place of the program expects its first request again.

        Args:
            withheld: passes of this step whose requests are left to torch's allocator.
        """
        if self.serving:
            self._native.begin_arena_step(sum(1 << each for each in withheld))

    def end_step(self) -> None:
        """Stop serving until the next step begins, since requests between two steps do not belong to the program."""
        if self.serving:
            self._native.end_arena_step()

    def leftovers(self) -> list[tuple[int, int]]:
        """Return ranges [begin, end) of bytes in the reused part that leftovers have occupied for a whole step."""
        return self._native.arena_leftovers() if self.serving else []

    def extend(self, nbytes: int) -> bool:
        """Replace the annex by one of `nbytes`; 0: remove it. Call this between two steps.

        The annex serves requests whose planned bytes leftovers hold.

        Returns:
            True if the annex was replaced; False if there was too little memory, so that there is no annex now.
        """
        try:
            self._native.extend_arena(nbytes)
        except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is a RuntimeError
            return False
        return True

    def lifetimes(self) -> tuple[list[int], list[int]]:
        """Return when each request of `ArenaTables.requests` came in this step, and when its block was freed.

        The time is the number of planned requests that had come before. -1: the request did not come, or the arena had
        no block for it; 2**31 - 1: the block is still in use.
        """
        return self._native.arena_lifetimes() if self.serving else ([], [])

    def inputs(self) -> Inputs:
        """Return the sizes of the inputs of the latest forward of each micro-batch."""
        return tuple(map(tuple, self._native.input_sizes()))

    def resized(self) -> list[tuple[int, int]]:
        """Return pairs (planned request, size) for the requests of this step that the plan does not have.

        The planned request, an index into `ArenaTables.requests`, did not come in this step; in its stead came one of
        `size` bytes, rounded up to whole blocks.
        """
        return self._native.resized_requests() if self.serving else []

    def close(self) -> None:
        """Stop serving, and release memory that is not in use.

        Memory in use is released when its last block is freed. A second call does nothing.
        """
        self._loaded.clear()
        if self._leave is not None:
            self._leave()
            self._leave = None

    def counters(self) -> Counters:
        """Return the counts of all requests so far, and the memory in use now."""
        return self._native.arena_counters()

    def native_bytes(self) -> int | None:
        """Return the bytes that CUDA's allocator counts as in use outside of the arena; None on other devices."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.memory_allocated(self.device) - self.counters().live_size

    def native_reserved_bytes(self) -> int | None:
        """Return the bytes that CUDA's allocator has reserved outside of the arena; None on other devices."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.memory_reserved(self.device) - self.counters().reserved_bytes


def _leave(core: object, stand_in_front: Callable[[bool], None]) -> None:
    """Release memory that is not in use, and step aside for torch's allocator (on CUDA, once all blocks are freed)."""
    core.close_arena()
    stand_in_front(False)


def _check_cuda(core: object) -> None:
    torch.cuda.init()  # before this call torch's allocator has no devices
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
            "the native core was built without the arena for CUDA, since memplug does not know the allocator of torch "
            f"{torch.__version__}",
            'Install another version of torch, or set "arena": {"enabled": false}.',
            code="MP006",
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
