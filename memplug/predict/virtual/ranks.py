"""One rank of a distributed training; the other ranks do not exist.

    with joined(rank=0, world_size=8):
        train()  # as it would under torchrun

Each process group is torch's fake one. A collective of virtual tensors moves nothing, but takes time on a stream for
collectives, which first waits for the current stream. A collective of CPU tensors returns as if all other ranks had
this rank's values, as object collectives and votes require.

As with NCCL, a collective holds its tensors until `Work.wait()` makes the current stream wait for the collective. The
other ranks are never late, so time in which a pipeline stage waits for another stage is not counted.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from memplug.errors import HardwareError
from memplug.predict.virtual import NAME, VirtualDevice, native
from memplug.predict.virtual.costs import collective_s
from memplug.predict.virtual.replacing import replaced
from memplug.session.ranks import MADE_UP
from memplug.torch_private import KNOWN, c10d, new_process_group, tree_leaves

WORK = """allreduce_coalesced_ reduce_ allgather_coalesced_ allgather_into_tensor_coalesced_ gather_ send recv_
recv_any_source_ reduce_scatter_tensor_coalesced_ alltoall_base_ barrier""".split()
OUTPUTS_AND_WORK = """allreduce_ broadcast_ allgather_ _allgather_base_ reduce_scatter_ _reduce_scatter_base_ scatter_
alltoall_""".split()
"""Operators of torch's library c10d: those in `WORK` return a `Work`, those in `OUTPUTS_AND_WORK` also outputs."""


@contextlib.contextmanager
def joined(rank: int, world_size: int) -> Iterator[None]:
    """Make this process rank `rank` of `world_size` and initialize torch.distributed inside the context.

    All groups that are made inside the context are fake, whichever backend is requested. The virtual device must exist.

    Args:
        rank: This process's rank.
        world_size: The number of ranks.

    Raises:
        HardwareError: The rank is not in [0, world_size), or torch.distributed is initialized already.
    """
    if not 0 <= rank < world_size:
        raise HardwareError(f"there is no rank {rank} of {world_size}", "Ranks go from 0 to world_size - 1.")
    if dist.is_initialized():
        raise HardwareError(
            "torch.distributed is initialized already, but a rank of the virtual device makes its own groups",
            "Remove the call of `init_process_group`, or destroy its group first.",
        )
    links = _registered()
    make = new_process_group

    @functools.wraps(make)
    def make_fake(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["backend_options"] = None  # the caller's options fit the requested backend, not the fake one
        return make(size, rank, ranks, dist.Backend(NAME), *args, **kwargs)

    with replaced(distributed_c10d, "_new_process_group_helper", make_fake, KNOWN), links.coalescing():
        dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class _Pending:
    """A collective that no stream has waited for yet; it holds its tensors until a stream waits."""

    def __init__(self, stream: torch.Stream, tensors: Sequence[torch.Tensor]):
        self.stream, self.event, self.tensors = stream, stream.record_event(), tensors

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream().wait_event(self.event)
        self.tensors = []
        return True

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for tensor in self.tensors:
                tensor.record_stream(self.stream)


class _Links:
    """The links from this rank to all other ranks; together they carry one collective at a time."""

    def __init__(self) -> None:
        self._core = native.load()
        self._stream = torch.Stream(NAME)
        self._coalesced: list[_Pending] | None = None

    def run(self, name: str, *arguments: Any) -> Any:
        """Run an operator of c10d on virtual tensors.

        Args:
            name: The operator's name.
            *arguments: The operator's arguments: tensors, then the group, then any others.

        Returns:
            The collective's `Work`; for operators in `OUTPUTS_AND_WORK`, a pair of the first argument and the `Work`.
        """
        at = next(index for index, each in enumerate(arguments) if isinstance(each, torch.ScriptObject))
        lists = [tree_leaves(each) for each in arguments[:at]]
        ranks = c10d.ProcessGroup.unbox(arguments[at]).size()
        nbytes = max(sum(tensor.nbytes for tensor in each) for each in lists)
        seconds = collective_s(VirtualDevice.current().hardware, name, nbytes, ranks)
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            self._core.launch(f"c10d::{name}", seconds)
        pending = _Pending(self._stream, sum(lists, []))
        if self._coalesced is not None:
            self._coalesced.append(pending)
        work = c10d.PythonCallbackWork(pending.wait).boxed()
        return (arguments[0], work) if name in OUTPUTS_AND_WORK else work

    @contextlib.contextmanager
    def coalescing(self) -> Iterator[None]:
        """Replace torch's coalescing inside the context: one `Work` then waits for all coalesced collectives."""

        def begin(group: dist.ProcessGroup, device: torch.device) -> None:
            self._coalesced = []

        def end(group: dist.ProcessGroup, device: torch.device) -> dist.Work:
            works, self._coalesced = self._coalesced or [], None
            return c10d.PythonCallbackWork(lambda timeout: all([work.wait() for work in works]))

        with (
            replaced(dist.ProcessGroup, "_start_coalescing", begin, KNOWN),
            replaced(dist.ProcessGroup, "_end_coalescing", end, KNOWN),
        ):
            yield


@functools.cache
def _registered() -> _Links:
    """Register c10d's operators and the fake backend for the virtual device, and return the process's links."""
    VirtualDevice.current()
    links = _Links()
    links.library = torch.library.Library("c10d", "IMPL")  # the operators stay registered while it lives
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*registered kernel")  # torch's own kernels, which are replaced
        for name in WORK + OUTPUTS_AND_WORK:
            links.library.impl(name, functools.partial(links.run, name), "PrivateUse1")
    MADE_UP.add(NAME)
    dist.Backend.register_backend(NAME, _fake_group, extended_api=True, devices=["cpu", NAME])
    return links


def _fake_group(common: Any, options: Any) -> c10d.FakeProcessGroup:
    return c10d.FakeProcessGroup._create_internal(common.group_rank, common.group_size)
