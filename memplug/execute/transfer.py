"""Rows on their way between device and host: two copy streams, events, and the pinned pool. The only file that copies.

A `Swapped` tensor is in one of three places; its copy out starts at once, or only when it has to go:

    resident ──release()──► away ──prefetch()──► fetched ──drop()──► away ...
       └── acquire() hands out the tensor in any of them ──┘

A tensor's stream is the one that its region's forward ran on. Its backward runs there too, even where a region on
another stream starts the copy. Three rules make every reuse of memory safe, in the order of events alone (`Wait` names
each one):
  1. device memory is released, or written in place, only after the tensor's stream has waited for the copy out that
     reads it;
  2. a copy in starts only after the present of the tensor's stream: earlier users of the new device memory are done,
     and so, by rule 1, is the copy out that filled the host rows;
  3. host rows go back to the pool only after the tensor's stream has waited for every copy in that reads them, and
     a copy out starts only after the present of all streams that regions have run on.
All device memory belongs to its tensor's stream, so the caching allocator needs no `record_stream`.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch

from memplug.errors import ConflictError, InPlaceError
from memplug.execute.core import core
from memplug.execute.device import Device, Wait
from memplug.execute.host_pool import HostPool, Slot

# whether the running backward is to leave its graph alive; a torch that does not say may want to
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class Swapped:
    """A tensor whose first `rows` of dimension 0 have a copy on the host.

    Attributes:
        tensor: the device memory, None while away. Detached; dense, covers its storage from offset 0.
        rows: rows `[0, rows)` are on the host.
        resident: `tensor` is still the original, with every row valid; afterwards only `[0, rows)` come back.
        mutated: the value was overwritten in place after it was captured: only a recompute pass can replay that.
        stream: that made it, and that its device memory belongs to.
    """

    __slots__ = (
        "transfer", "order", "tensor", "size", "stride", "dtype", "nbytes", "rows", "slot", "resident", "offloaded",
        "fetched", "version", "mutated", "stream", "uses_left", "uses",
    )  # fmt: skip

    def __init__(self, transfer: Transfer, tensor: torch.Tensor, rows: int):
        self.transfer = transfer
        self.order = 0  # of its copy out among all copies out
        self.tensor: torch.Tensor | None = alias_of(tensor)
        self.size, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.nbytes = tensor.untyped_storage().nbytes()
        self.rows = rows
        self.slot: Slot | None = None  # until its copy out starts
        self.resident = True
        self.offloaded: Any = None  # event that compute has not waited for yet
        self.fetched: Any = None  # likewise
        self.version = self.tensor._version
        self.mutated = False
        self.stream = transfer.device.compute_stream()
        self.uses = 0  # reads in one backward pass
        self.uses_left = 0

    @property
    def whole(self) -> bool:
        """Whether all rows are on the host."""
        return self.rows == self.size[0]

    def host_rows(self) -> torch.Tensor:
        """The host copy, shape `[rows, ...]`, in the memory order of the device tensor."""
        flat = self.slot.data.view(self.dtype)
        if self.whole:
            return flat.as_strided(self.size, self.stride)
        if self.size[0] == 1 or self.stride[0] == max(self.stride):
            return flat.as_strided((self.rows, *self.size[1:]), self.stride)
        return flat.view(self.rows, *self.size[1:])

    def device_rows(self) -> torch.Tensor:
        """The same rows on the device."""
        assert self.tensor is not None
        return self.tensor if self.whole else self.tensor[: self.rows]

    def __del__(self) -> None:
        # Any thread, any time: only note what is left. The compute stream orders it at the next `Transfer.drain`.
        held_bytes = self.nbytes if self.tensor is not None else 0
        counts = (held_bytes, 0) if self.resident else (0, held_bytes)
        self.transfer._abandoned.append((self.tensor, self.stream, self.fetched, self.offloaded, self.slot, *counts))


class Transfer:
    """Copies between one device and the host pool.

    Args:
        device: streams, events, copies.
        pool: host rows.
    """

    def __init__(self, device: Device, pool: HostPool):
        self.device = device
        self.pool = pool
        self.offload_stream = device.new_stream()
        self.prefetch_stream = device.new_stream()
        self.fetched_bytes = 0  # device bytes of fetched tensors not dropped yet
        self.resident_bytes = 0  # device bytes of captured tensors that were not let go yet
        self.offloads = 0
        self.offloaded_total_bytes = 0
        self.hurried = 0  # copies out that started, or ended, since their tensor was about to be written to
        self.prefetched_total_bytes = 0
        self.closed = False
        self.refused = 0  # times the pool had no room
        self.refused_bytes = 0
        self._abandoned: collections.deque[Any] = collections.deque()
        self._compute_streams: list[Any] = []  # that regions have run on

    def offload(self, tensor: torch.Tensor, rows: int, later: bool = False) -> Swapped | None:
        """Start copying rows `[0, rows)` of a dense device tensor to the host; None when the pool is exhausted.

        Args:
            later: only when its device memory is to be let go, which may never be.
        """
        self.drain()
        slot = None if later else self._take(tensor.untyped_storage().nbytes() // tensor.shape[0] * rows)
        if slot is None and not later:
            return None
        swapped = Swapped(self, tensor, rows)
        if swapped.stream not in self._compute_streams:
            self._compute_streams.append(swapped.stream)
        self.resident_bytes += swapped.nbytes
        if slot is not None:
            self._send(swapped, slot)
        return swapped

    def _take(self, nbytes: int) -> Slot | None:
        slot = self.pool.take(nbytes)
        if slot is None:
            self.refused += 1
            self.refused_bytes += nbytes
        return slot

    def _send(self, swapped: Swapped, slot: Slot) -> None:
        self.offloads += 1
        swapped.order, swapped.slot = self.offloads, slot
        for stream in self._compute_streams:
            self.device.wait(self.offload_stream, self.device.record(stream), Wait.OFFLOAD_FOR_COMPUTE)
        self.device.copy(self.offload_stream, swapped.host_rows(), swapped.device_rows())
        swapped.offloaded = self.device.record(self.offload_stream)
        self.offloaded_total_bytes += slot.data.numel()

    def _send_late(self, group: Sequence[Swapped]) -> None:
        """Start the copies out that have not been; where the pool has no room, the tensor stays."""
        for swapped in group:
            if swapped.slot is None:
                self._check_version(swapped)
                slot = self._take(swapped.nbytes // swapped.size[0] * swapped.rows)
                if slot is not None:
                    self._send(swapped, slot)

    def release(self, group: Sequence[Swapped]) -> None:
        """Let the device memory of resident tensors go, once the last of their copies out is done.

        The copies are on one stream: a wait for the last covers all.

        Raises:
            InPlaceError: the tensor was modified in place outside its region, and its copy out may have read either
                value.
        """
        group = [swapped for swapped in group if swapped.resident and swapped.tensor is not None]
        self._send_late(group)
        group = [swapped for swapped in group if swapped.slot is not None]
        for stream in self._compute_streams:
            pending = [swapped for swapped in group if swapped.offloaded is not None and swapped.stream == stream]
            if pending:
                last = max(pending, key=lambda swapped: swapped.order)
                self.device.wait(stream, last.offloaded, Wait.RELEASE_FOR_OFFLOAD)
        for swapped in group:
            self._check_version(swapped)
            swapped.offloaded = None
            self._leave(swapped)

    def before_write(self, swapped: Swapped) -> None:
        """An operator is about to write to the captured tensor in place: finish the copy out, and forget the device
        memory; where there is no copy, since the host is full, the device keeps one.
        """
        self.hurried += 1
        self._send_late([swapped])
        swapped.mutated = True
        if swapped.slot is None:
            swapped.tensor = alias_of(swapped.tensor.clone())
            swapped.version = swapped.tensor._version
            return
        if swapped.offloaded is not None:
            for stream in self._with_current(swapped.stream):
                self.device.wait(stream, swapped.offloaded, Wait.MUTATE_FOR_OFFLOAD)
            swapped.offloaded = None
        self._leave(swapped)

    def prefetch(self, swapped: Swapped) -> None:
        """Start copying the host rows into new device memory of the full size; nothing to do unless the tensor is
        away.
        """
        if swapped.tensor is not None:
            return
        if self.closed:
            raise ConflictError(
                "backward ran through a graph after its memplug session was detached, and its rows are gone",
                "Run backward on the graphs in flight first, then detach.",
            )
        self.drain()
        with self.device.on(swapped.stream):
            swapped.tensor = self.device.empty(swapped.size, swapped.stride, swapped.dtype)
        self.device.wait(self.prefetch_stream, self.device.record(swapped.stream), Wait.PREFETCH_FOR_COMPUTE)
        self.device.copy(self.prefetch_stream, swapped.device_rows(), swapped.host_rows())
        swapped.fetched = self.device.record(self.prefetch_stream)
        self.fetched_bytes += swapped.nbytes
        self.prefetched_total_bytes += swapped.slot.data.numel()

    def acquire(self, swapped: Swapped) -> tuple[torch.Tensor, int]:
        """The device tensor, and how many of its first rows the compute stream may read from now on."""
        self.prefetch(swapped)
        if swapped.fetched is not None:
            for stream in self._with_current(swapped.stream):
                self.device.wait(stream, swapped.fetched, Wait.USE_FOR_PREFETCH)
            swapped.fetched = None
        if swapped.resident:
            self._check_version(swapped)
        return swapped.tensor, swapped.size[0] if swapped.resident else swapped.rows

    def drop(self, swapped: Swapped) -> None:
        """The device memory has had its last use in this backward pass; its host rows stay for another, or where there
        are none, the memory itself.
        """
        if swapped.resident and swapped.slot is None:
            if not _keeps_graph():
                self._leave(swapped)
        elif swapped.resident:
            self.release([swapped])
        elif swapped.tensor is not None:
            self.fetched_bytes -= swapped.nbytes
            swapped.tensor = None

    def drain(self) -> None:
        """Return what abandoned tensors held.

        Device memory is released once its stream has waited for the copy in that writes it, or for the copy out that
        reads it: what that writes is never read, but memory may be given back to the system while it reads.
        """
        while self._abandoned:
            tensor, stream, fetched, offloaded, slot, resident_bytes, fetched_bytes = self._abandoned.popleft()
            if fetched is not None:
                self.device.wait(stream, fetched, Wait.DISCARD_FOR_PREFETCH)
            if offloaded is not None:
                self.device.wait(stream, offloaded, Wait.RELEASE_FOR_OFFLOAD)
            del tensor
            self.resident_bytes -= resident_bytes
            self.fetched_bytes -= fetched_bytes
            if not self.closed and slot is not None:
                self.pool.give(slot)

    def close(self) -> None:
        """Wait for every copy, and give the host memory back."""
        self.drain()
        self.closed = True
        self.pool.close()

    def _with_current(self, stream: Any) -> list[Any]:
        """A stream, and the one that operators run on now where that is another."""
        current = self.device.compute_stream()
        return [stream] if current == stream else [stream, current]

    def _leave(self, swapped: Swapped) -> None:
        if swapped.resident and swapped.tensor is not None:
            self.resident_bytes -= swapped.nbytes
        swapped.tensor = None
        swapped.resident = False

    def _check_version(self, swapped: Swapped) -> None:
        if swapped.tensor is not None and swapped.tensor._version != swapped.version:
            raise InPlaceError(
                f"a {tuple(swapped.size)} tensor was modified in place after its region had ended and before its copy "
                "to the host was done"
            )


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and version counter, without the graph. Inside a dispatch mode `detach` alone makes a version
    counter of its own, and a write by the rest of the program would go unnoticed."""
    known = core()
    if known is not None:
        return known.alias(tensor)
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        return tensor.detach()


def swappable(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers its storage densely, so that its rows can travel as they lie in memory."""
    if tensor.dim() == 0 or tensor.storage_offset() != 0 or tensor.numel() == 0:
        return False
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
