"""Runs a swap list in the native core; without a list, offloads tensors when a request for memory fails."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from memplug.device.device import Device
from memplug.device.host_pool import HostPool
from memplug.errors import SwapError
from memplug.profile.operator_names import COLLECTIVES
from memplug.profile.recorder import dtype_numbers
from memplug.swap.plan.from_trace import Clock
from memplug.swap.plan.part import SwapPart
from memplug.swap.tables import SwapTables, tables_of
from memplug.torch_private import empty_host_cache
from memplug.words import size

Relief = tuple[str, int]
"""One event of the handling of a failed request, and its bytes. First, the request "failed". Then tensors on their way
out were "released", idle tensors "left", or tensors on their way back were "turned back". In the end the request was
"served", or "given up" (0 bytes)."""


class InForce:
    """The native core's swapping; inactive until `watch` or `swap` is called.

    From then on, if a request for device memory fails inside a step, memplug frees memory and tries again. First it
    releases tensors that are on their way out. Then it offloads idle tensors, in the order of
    memplug/swap/native/short_step.cpp. Last, it lets tensors that are on their way back stay on the host (Chameleon,
    section 6.3, algorithm 3).

    Args:
        device: the device that trains.
        core: the native core.
        min_bytes: smallest tensor to offload.
        host_bytes: returns the bytes of host memory that swapping may use.
        explain: see `memplug.session.given.Given`.

    Attributes:
        relief: actions in the last step in which a request failed.
        relieved_bytes: bytes that were freed for failed requests in the last step.
        has_failed: whether a request of the last step was given up; the step may then not have completed.
    """

    def __init__(
        self,
        device: Device,
        core: Any,
        min_bytes: int,
        host_bytes: Callable[[], int],
        explain: Callable[[], str],
    ):
        self.relief: list[Relief] = []
        self.relieved_bytes = 0
        self.has_failed = False
        self._device, self._core, self._min_bytes = device, core, min_bytes
        self._host_bytes, self._explain = host_bytes, explain
        self._pool: HostPool | None = None
        self._swapper: Any = None
        self._catches = False
        # holds the native swapper in force: the finalizer drops it if the session is deleted without `detach`
        self._loaded: list[Any] = []
        self._finalizer = weakref.finalize(self, _drop, core, self._loaded, str(device.torch_device))
        self._finalizer.atexit = False
        self._former: dict[str, int] = {}  # counters of earlier lists, summed

    @property
    def counters(self) -> dict[str, int]:
        """Return the native core's counts and bytes of swapping, by name, over all steps of the session."""
        if self._swapper is None:
            return self._former
        counters = {**self._swapper.counters, **self._core.swap_list_counters()}
        return {name: count + self._former.get(name, 0) for name, count in counters.items()}

    @property
    def missed(self) -> int:
        """Return how many tensors of the list were not found, summed over the steps under the list."""
        return self._core.swap_list_counters()["missed"]

    def watch(self) -> None:
        """Begin to offload tensors when a request fails, without a list.

        Raises:
            SwapError: memplug cannot stand in front of the device's allocator.
        """
        self._catch(True)
        pinned_bytes = self._pool.capacity_bytes if self._pool is not None else 0
        self._load(SwapTables.empty(), self._min_bytes, None, self._host_bytes() - pinned_bytes)

    def swap(self, part: SwapPart) -> None:
        """Begin to offload and prefetch tensors by this list.

        Raises:
            SwapError: the host has too little memory for it.
        """
        budget_bytes = self._host_bytes()
        if self._pool is None:
            self._pool = HostPool(self._device, budget_bytes, self._core)
        self._pool.budget_bytes = budget_bytes
        self._pool.reserve(part.host_bytes)
        if self._pool.capacity_bytes < part.host_bytes:
            text = f"the host has no {size(part.host_bytes)} for the swap list"
            raise SwapError(text, 'Lower "host_budget_gib" to the memory that the host has free.', code="MP015")
        tables = tables_of(part, self._core, dtype_numbers(self._core))
        smallest = min((target.nbytes for target in part.targets), default=0)
        passive_bytes = budget_bytes - self._pool.capacity_bytes
        with contextlib.suppress(SwapError):  # `watch` has reported the error
            self._catch(True)
        self._load(tables, max(1, min(smallest, self._min_bytes)), self._pool.slabs[0], passive_bytes)

    def give_back(self) -> None:
        """Release the host memory of lists, which stays pinned from list to list; call it after `end`."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def end(self) -> bool:
        """Restore all tensors, and stop swapping.

        Returns:
            False if the device has no room for some tensors, which stay on the host.
        """
        if self._swapper is None:
            return True
        self._core.end_swap_step()
        passive = self._swapper.counters["passive"]
        self._former = self.counters
        is_empty = self._swapper.restore_all()
        self._core.unload_swap_list()
        swapper, self._swapper = self._swapper, None
        if not is_empty:
            self._pool = None  # the swapper holds its memory for as long as tensors are there
        else:
            del swapper
            if self._pool is None and self._device.kind == "cuda" and passive:
                empty_host_cache()  # pinned memory of tensors offloaded for a failed request
        self._loaded.clear()
        if self._catches:
            self._catch(False)
        return is_empty

    def begin_step(self) -> None:
        """Begin to swap; called when a step begins."""
        if self._swapper is not None:
            self._core.begin_swap_step()

    def end_step(self) -> None:
        """Stop swapping until the next step, and restore tensors, unless the device has no room for them."""
        if self._swapper is not None:
            self._core.end_swap_step()
            events = self._core.take_relief_events()
            self.relief = events or self.relief
            self.relieved_bytes = sum(nbytes for kind, nbytes in events if kind in ("released", "left", "turned back"))
            self.has_failed = any(kind == "given up" for kind, _ in events)

    def measure(self, *, waits: bool = False, operators: bool = False) -> None:
        """Measure from now on how long operators wait for copies (`waits`), and how long they run (`operators`)."""
        if self._swapper is not None:
            self._swapper.measure(waits, operators)

    def waited_s(self) -> float | None:
        """Return the seconds that operators waited for copies; on the CPU, the seconds that its copies took.

        Returns:
            None while the device still works on the step, or if nothing is in force.
        """
        return None if self._swapper is None else self._swapper.waited_s()

    def operators_s(self, clock: Clock) -> np.ndarray | None:
        """Return how long each outermost operator ran in the measured step, without its waits for copies.

        The host waits until the device is done with the step.

        Args:
            clock: the clock of the measured step.

        Returns:
            Seconds, float64[places]; None if nothing was measured, or the step did not run the operators of `clock`.
        """
        self._device.synchronize()
        measured = None if self._swapper is None else self._swapper.operators_s()
        if measured is None or len(measured) != clock.ticks + 1:
            return None
        return np.array(measured[: clock.places], np.float64)

    def _load(self, tables: SwapTables, min_bytes: int, slab: torch.Tensor | None, passive_bytes: int) -> None:
        self._swapper = self._core.StorageSwapper(self._device.streams(self._core), slab, max(0, passive_bytes))
        self._loaded[:] = [self._swapper]
        device_type = self._core.device_type(self._device.kind)
        self._core.load_swap_list(
            tables.program,
            tables.outside,
            tables.ranks,
            tables.targets,
            tables.anchors,
            min_bytes,
            COLLECTIVES,
            self._swapper,
            device_type,
        )

    def _catch(self, on: bool) -> None:
        if self._device.kind == "cuda":
            torch.cuda.init()  # before this call torch has no CUDA allocator to stand in front of
        try:
            self._core.catch_out_of_memory(on, str(self._device.torch_device), self._explain if on else None)
        except RuntimeError as error:
            text = f"memplug cannot catch requests for memory that fail: {str(error).splitlines()[0]}"
            raise SwapError(text, code="MP015") from None
        self._core.take_relief_events()  # discards events that a session left when it ended within a step
        self._catches = on


def _drop(core: Any, loaded: list[Any], device: str) -> None:
    if loaded and core.drop_swap_list(loaded[0]):
        core.limit_cpu(-1)
        with contextlib.suppress(RuntimeError):  # nothing stands in front of the allocator, or another library does
            core.catch_out_of_memory(False, device, None)
