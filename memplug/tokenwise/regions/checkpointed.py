"""A forward without the native core: torch's own checkpoint, with the region's input on the host.

Copies are those of torch, and the host waits for each: right everywhere, and slow. With the native core they overlap
with computation (memplug/native/transfer.h).
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from memplug.tokenwise.regions.buffers import Buffers, check_version
from memplug.tokenwise.regions.tape import storage_of
from memplug.tokenwise.regions.watch import WriteMode

if TYPE_CHECKING:
    from memplug.tokenwise.regions.executor import Executor
    from memplug.tokenwise.regions.region import Region


class Copy:
    """A region input on the host."""

    def __init__(self, copies: Copies, tensor: torch.Tensor):
        self.copies, self.device = copies, tensor.device
        self.data = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda").copy_(tensor)
        self.nbytes = tensor.nbytes

    def __del__(self) -> None:
        self.copies.used_bytes -= self.nbytes


class Copies:
    """What an executor without the native core has instead of a transfer, its pool and its flow; see those
    (`memplug/native/transfer.h`, `memplug.device.host_pool`, `memplug/native/flow.h`).

    Args:
        budget_bytes: bound of the host memory of all copies.
    """

    def __init__(self, budget_bytes: int):
        self.budget_bytes = budget_bytes
        self.share = 1.0
        self.forwards = self.live = self.unplanned = self.strayed = self.expected_bytes = 0
        self.used_bytes = self.peak_bytes = 0
        self.offloads = self.offloaded_total_bytes = self.prefetched_total_bytes = 0
        self.refused = self.refused_bytes = 0
        self.allocations = self.buffer_bytes = self.buffer_misses = self.largest_frame_bytes = 0
        self.prefetched_bytes = self.input_bytes = self.recomputed_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """Each copy has memory of its own."""
        return self.used_bytes

    def offload(self, tensor: torch.Tensor) -> Copy | None:
        """Copy a tensor to the host; None where the budget has no room."""
        if self.used_bytes + tensor.nbytes > self.budget_bytes:
            self.refused += 1
            self.refused_bytes += tensor.nbytes
            return None
        self.used_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.offloads += 1
        self.offloaded_total_bytes += tensor.nbytes
        return Copy(self, tensor)

    def prefetch(self, copy: Copy) -> torch.Tensor:
        """A new tensor on the device."""
        self.prefetched_total_bytes += copy.nbytes
        self.allocations += 1
        return copy.data.to(copy.device, copy=True)

    def reserve(self, nbytes: int) -> bool:
        """Nothing is reserved."""
        return True

    def take_peak_bytes(self) -> int:
        """The most that was in use so far."""
        return self.peak_bytes

    def _nothing(self) -> None:
        """Nothing is prefetched along the order of forwards, reserved, or left over: copies go with their graphs."""

    begin_micro_batch = give_back = drain = close = _nothing

    def end_step(self, regions: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        """Of each region, bytes of all tensors given to each forward of the step."""
        return tuple(tuple(region.end_step()) for region in regions)


class EachTime(contextlib.AbstractContextManager[None]):
    """A context that can be entered again, as where backward runs twice through one graph.

    Args:
        make: gives one that is entered once.
    """

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]):
        self._make, self._entered = make, contextlib.ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._make())

    def __exit__(self, *error: Any) -> bool:
        return bool(self._entered.__exit__(*error))


class Checkpointed:
    """One forward of one region; torch's checkpoint keeps it as long as the graph."""

    def __init__(self, executor: Executor, region: Region, call: Callable[..., Any], args: Any, kwargs: Any):
        self.executor, self.region, self.call = executor, region, call
        self._copies: Copies = executor.transfer
        self._surroundings = [take() for take in executor.hooks.surroundings]
        self._buffers = Buffers()
        self._values, self._spec = tree_flatten((args, kwargs))
        tensors = {i: value for i, value in enumerate(self._values) if isinstance(value, torch.Tensor)}
        region.native.note_given(sum(tensor.nbytes for tensor in tensors.values()))
        self._inputs = {i: tensor for i, tensor in tensors.items() if not (tensor.is_leaf and tensor.requires_grad)}
        self._values = [None if i in self._inputs else value for i, value in enumerate(self._values)]
        self._held: list[tuple[torch.Tensor, int]] = []  # inputs that stay, and their versions after the forward
        given = collections.Counter(map(storage_of, self._inputs.values()))  # twice: copies would be two memories
        self._swapped = {
            storage
            for tensor in self._inputs.values()
            if given[storage := storage_of(tensor)] == 1 and self._swaps(tensor)
        }
        self._copies.forwards += 1
        self._copies.live += 1

    def __del__(self) -> None:
        if hasattr(self, "_swapped"):
            self._copies.live -= 1

    def _swaps(self, tensor: torch.Tensor) -> bool:
        """Whether it leaves for the host: gradients flow through it."""
        large = type(tensor) is torch.Tensor and tensor.nbytes >= max(1, self.executor.min_offload_bytes)
        return tensor.requires_grad and large and tensor.device.type == self.executor.device.kind

    def forward(self) -> Any:
        """Run the region's forward once. Shapes and values are those of the region's own forward."""
        inputs, self._inputs = self._inputs, dict.fromkeys(self._inputs)  # torch's checkpoint has them, as packed here
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with hooks, set_checkpoint_early_stop(False):
            out = checkpoint(self._run, *inputs.values(), use_reentrant=False, context_fn=self._contexts)
        self._held = [(tensor, tensor._version) for tensor, _ in self._held]
        return out

    def _run(self, *inputs: torch.Tensor) -> Any:
        given = dict(zip(self._inputs, inputs, strict=True))
        args, kwargs = tree_unflatten([given.get(i, value) for i, value in enumerate(self._values)], self._spec)
        return self.call(*args, **kwargs)

    def _pack(self, tensor: torch.Tensor) -> Any:
        copy = self._copies.offload(tensor) if storage_of(tensor) in self._swapped else None
        if copy is None:
            self._swapped.discard(storage_of(tensor))
            self._held.append((tensor, tensor._version))
        return copy or tensor

    def _unpack(self, packed: Copy | torch.Tensor) -> torch.Tensor:
        return self._copies.prefetch(packed) if isinstance(packed, Copy) else packed

    def _contexts(self) -> tuple[Any, Any]:
        """Around the forward, and around a recompute pass."""
        return WriteMode(self._before_write), EachTime(self._recompute)

    def _before_write(self, tensor: torch.Tensor) -> None:
        """An operator is about to write to memory that was there before the region: a recompute pass must find its
        value of now, and leave no trace.
        """
        if storage_of(tensor) not in self._swapped and not self.executor.is_scratch(tensor):
            self._buffers.note(tensor)

    @contextlib.contextmanager
    def _recompute(self) -> Iterator[None]:
        executor, region = self.executor, self.region
        for tensor, version in self._held:
            check_version(tensor, version)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(executor.rerunning())
                stack.enter_context(executor.standing_around("recompute", region))
                stack.enter_context(self._buffers.as_before())
                for again in self._surroundings:
                    stack.enter_context(again())
                yield
        except torch.OutOfMemoryError as error:
            executor.explain("recompute", region, error)
            raise
