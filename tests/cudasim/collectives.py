"""NCCL's stand-in on simulated CUDA: the operators of c10d on the device's tensors, which gloo exchanges on the host.

`dist.init_process_group("nccl")` and the functions built on it return the same groups as on a GPU. torch's dispatcher
sees the same operators; their kernels are in this module. Observers do not see the operators that the kernels run. As
with NCCL, each collective runs on its group's stream, which first waits for the current stream. On the group's stream,
inputs are copied to pinned memory, and results from it. `Work.wait()` makes the current stream wait for the group's, by
an event. Reading a result without waiting is a race, which the simulator reports.

Unlike with NCCL, the host continues only when all ranks have arrived, since gloo needs them. The device has run its
earlier work by then, which orders nothing (see `cudasim_run`). In the `wait()` of a `recv`, the host waits for the
sender; only then is the result on the device, which has NaN there before. Reductions add up the gathered values in
rank order.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

Tensors = Sequence[torch.Tensor]
Exchange = Callable[[list[torch.Tensor]], Iterable[torch.Tensor]]
OPERATIONS = {"SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
ALIGNMENT_BYTES = 64
MOST_SENDS = 64  # sends that may be outstanding at a time


class HostNccl(c10d.ProcessGroupGloo):
    """A substitute for `ProcessGroupNCCL`, which uses only the timeout of the options."""

    Options = c10d.ProcessGroupNCCL.Options
    supports_coalescing, supports_splitting = True, False

    def __init__(self, store: Any, rank: int, size: int, options: Any):
        super().__init__(store, rank, size, getattr(options, "_timeout", options))
        _link(self)
        _register()


class Pending:
    """Work of a stream; it holds the tensors that it reads and writes, until another stream waits for the work."""

    def __init__(self, stream: torch.cuda.Stream, tensors: Tensors):
        self.stream, self.event, self.tensors = stream, stream.record_event(), tensors
        self.finish: Callable[[], Pending] | None = None
        self.holds_host = False

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the work; `recv` and a barrier make the host wait too."""
        if self.finish is not None:
            self.event = self.finish().event
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_event(self.event)
        if self.holds_host:
            current.synchronize()
        self.tensors, self.finish = [], None
        return True

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for tensor in self.tensors:
                tensor.record_stream(self.stream)


class Link:
    """Connects a group's tensors on the device with gloo."""

    def __init__(self, gloo: c10d.ProcessGroupGloo):
        self.gloo = gloo
        self.rank, self.size = gloo.rank(), gloo.size()
        self.coalesced: list[c10d.Work] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._pinned = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._sends: collections.deque[c10d.Work] = collections.deque()

    def run(self, inputs: Tensors, outputs: Tensors, exchange: Exchange) -> Pending:
        """Pass host copies of `inputs` to `exchange`; copy its results to `outputs`, which have as many elements."""
        with self._entered([*inputs, *outputs]) as stream:
            staged = self._views(inputs)
            for pinned, tensor in zip(staged, inputs, strict=True):
                pinned.copy_(tensor.data, non_blocking=True)
            _run(stream)
            results = exchange([pinned.clone() for pinned in staged])
            return self._deliver(results, outputs, stream, inputs)

    def gathered(self, staged: Tensors) -> list[list[torch.Tensor]]:
        """Return the staged tensors of all ranks, which have the same shapes and types: by rank, then by tensor."""
        ranks = [[torch.empty_like(tensor) for tensor in staged] for _ in range(self.size)]
        for index, tensor in enumerate(staged):
            if tensor.numel():
                self.gloo.allgather([[_bytes(tensors[index]) for tensors in ranks]], [_bytes(tensor)]).wait()
        return ranks

    def reduced(self, operation: Any, staged: Tensors) -> list[torch.Tensor]:
        """Return the reductions over all ranks, tensor by tensor; half precision is added up in float32.

        Raises:
            ValueError: NCCL has no such operation.
        """
        if operation.name not in OPERATIONS:
            raise ValueError(f"Cannot use ReduceOp.{operation.name} with NCCL")
        results = []
        for tensors in zip(*self.gathered(staged), strict=True):
            wide = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else tensors[0].dtype
            total = functools.reduce(OPERATIONS[operation.name], [tensor.to(wide) for tensor in tensors])
            results.append((total / self.size if operation.name == "AVG" else total).to(tensors[0].dtype))
        return results

    def swapped(self, staged: Tensors, given_bytes: list[int], outputs: Tensors, taken_bytes: list[int]) -> Tensors:
        """Exchange tensors with all ranks, and return those that this rank receives.

        Args:
            staged: Tensors that this rank sends.
            given_bytes: Bytes that this rank sends to each rank.
            outputs: Tensors whose sizes and type the results have.
            taken_bytes: Bytes that this rank receives from each rank.
        """
        taken = torch.empty(sum(taken_bytes), dtype=torch.uint8, device="cpu")
        self.gloo.alltoall_base(taken, torch.cat([_bytes(x) for x in staged]), taken_bytes, given_bytes).wait()
        pieces = taken.split([output.nbytes for output in outputs])
        return [piece.clone().view(output.dtype) for piece, output in zip(pieces, outputs, strict=True)]

    def _deliver(self, results: Iterable, outputs: Tensors, stream: torch.cuda.Stream, inputs: Tensors) -> Pending:
        for pinned, output, result in zip(self._views(outputs), outputs, results, strict=False):
            pinned.copy_(result.view(pinned.shape))
            output.data.copy_(pinned, non_blocking=True)  # `data`: autograd's version does not change, as with NCCL
        return Pending(stream, [*inputs, *outputs])

    @contextlib.contextmanager
    def _entered(self, tensors: Tensors, waits: bool = True) -> Iterator[torch.cuda.Stream]:
        """Make the group's stream current; with `waits`, let it first wait for the stream that was current."""
        device = tensors[0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        if waits:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch._C.DisableTorchFunction(), torch.no_grad(), torch.cuda.stream(self._stream):
            yield self._stream

    def _views(self, tensors: Tensors) -> list[torch.Tensor]:
        """Return pinned memory in the shapes of the tensors.

        All calls share this memory. The stream's order separates its uses on the device, and the host touches it only
        when the stream has finished all of its work.
        """
        begins = [0]
        for tensor in tensors:
            begins.append(begins[-1] + -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        if begins[-1] > len(self._pinned):
            self._pinned = torch.empty(2 * begins[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
        pieces = zip(begins, tensors, strict=False)
        return [self._pinned[at : at + x.nbytes].view(x.dtype).view(x.shape) for at, x in pieces]

    # The operators of c10d, without the group argument; a single tensor arrives as a list of one.

    def allreduce_(self, tensors: Tensors, operation: Any, *_: Any) -> Pending:
        return self.run(tensors, tensors, functools.partial(self.reduced, operation))

    def reduce_(self, tensors: Tensors, operation: Any, root: int, *_: Any) -> Pending:
        return self.run(tensors, tensors if self.rank == root else [], functools.partial(self.reduced, operation))

    def broadcast_(self, tensors: Tensors, root: int, *_: Any) -> Pending:
        mine, others = (tensors, []) if self.rank == root else ([], tensors)
        return self.run(mine, others, lambda staged: self.gathered(staged or _blank(tensors))[root])

    def allgather_(self, outputs: Sequence[Tensors], inputs: Tensors, *_: Any) -> Pending:
        return self.allgather_coalesced_(list(zip(*outputs, strict=True)), inputs)

    def allgather_coalesced_(self, outputs: Sequence[Tensors], inputs: Tensors, *_: Any) -> Pending:
        return self.run(inputs, sum(map(list, outputs), []), lambda staged: sum(self.gathered(staged), []))

    def allgather_into_tensor_coalesced_(self, outputs: Tensors, inputs: Tensors, *_: Any) -> Pending:
        return self.run(inputs, outputs, lambda staged: map(torch.stack, zip(*self.gathered(staged), strict=True)))

    def reduce_scatter_(self, outputs: Tensors, inputs: Sequence[Tensors], operation: Any, *_: Any) -> Pending:
        given, mine = sum(map(list, inputs), []), slice(self.rank, None, self.size)
        return self.run(given, outputs, lambda staged: self.reduced(operation, staged)[mine])

    def reduce_scatter_tensor_coalesced_(self, outputs: Tensors, inputs: Tensors, operation: Any, *_: Any) -> Pending:
        reduced = functools.partial(self.reduced, operation)
        return self.run(inputs, outputs, lambda staged: [x.view(self.size, -1)[self.rank] for x in reduced(staged)])

    def scatter_(self, outputs: Tensors, inputs: Sequence[Tensors], root: int, *_: Any) -> Pending:
        given, blank = sum(map(list, inputs), []) if self.rank == root else [], _blank(outputs) * self.size
        return self.run(given, outputs, lambda staged: self.gathered(staged or blank)[root][self.rank :: self.size])

    def alltoall_(self, outputs: Tensors, inputs: Tensors, *_: Any) -> Pending:
        given, taken = [x.nbytes for x in inputs], [x.nbytes for x in outputs]
        return self.run(inputs, outputs, lambda staged: self.swapped(staged, given, outputs, taken))

    def alltoall_base_(self, outputs: Tensors, inputs: Tensors, taken: list[int], given: list[int], *_: Any) -> Pending:
        def sizes_bytes(tensor: torch.Tensor, rows: list[int]) -> list[int]:
            row_bytes = tensor.nbytes // max(len(tensor), 1)
            return [count * row_bytes for count in rows] or [tensor.nbytes // self.size] * self.size

        sizes = sizes_bytes(inputs[0], given), outputs, sizes_bytes(outputs[0], taken)
        return self.run(inputs, outputs, lambda staged: self.swapped(staged, *sizes))

    def send(self, tensors: Tensors, to: int, tag: int) -> Pending:
        if len(self._sends) == MOST_SENDS:
            self._sends.popleft().wait()
        begin = self._sends.append
        return self.run(tensors, [], lambda staged: begin(self.gloo.send([_bytes(staged[0])], to, tag)) or [])

    def recv_(self, tensors: Tensors, source: int, tag: int) -> Pending:
        received = _blank(tensors)
        work = self.gloo.recv([_bytes(received[0])], source, tag)

        def finish() -> Pending:
            work.wait()
            with self._entered(tensors, waits=False) as stream:
                _run(stream)
                return self._deliver(received, tensors, stream, [])

        with self._entered(tensors) as stream:
            tensors[0].data.fill_(float("nan") if tensors[0].is_floating_point() else 1)
            pending = Pending(stream, tensors)
        pending.finish = finish
        return pending

    def barrier(self, tensors: Tensors, *_: Any) -> Pending:
        pending = self.run(tensors, [], lambda _: self.gloo.barrier().wait() and [])
        pending.holds_host = True
        return pending

    allreduce_coalesced_, gather_, _allgather_base_ = allreduce_, allgather_, allgather_into_tensor_coalesced_
    _reduce_scatter_base_ = reduce_scatter_tensor_coalesced_


WORK = """allreduce_coalesced_ reduce_ allgather_coalesced_ allgather_into_tensor_coalesced_ gather_ send recv_
reduce_scatter_tensor_coalesced_ alltoall_base_ barrier""".split()
OUTPUTS_AND_WORK = """allreduce_ broadcast_ allgather_ _allgather_base_ reduce_scatter_ _reduce_scatter_base_ scatter_
alltoall_""".split()
_links: dict[c10d.ProcessGroupGloo, Link] = {}  # never removed: C++ keeps a group, but not its Python object


def _link(gloo: c10d.ProcessGroupGloo) -> Link:
    """Return the link of a group; groups that were made for gloo alone get one too."""
    return _links[gloo] if gloo in _links else _links.setdefault(gloo, Link(gloo))


def _kernel(name: str, *arguments: Any) -> Any:
    """Run an operator of c10d; its arguments are tensors, the group, and others, such as a boxed `ReduceOp`."""
    at = next(index for index, argument in enumerate(arguments) if isinstance(argument, torch.ScriptObject))
    tensors = [[one] if isinstance(one, torch.Tensor) else one for one in arguments[:at]]
    rest = [c10d.ReduceOp.RedOpType(x.op()) if isinstance(x, torch.ScriptObject) else x for x in arguments[at + 1 :]]
    device = torch.utils._pytree.tree_leaves(tensors)[0].device
    link = _link(c10d.ProcessGroup.unbox(arguments[at])._get_backend(device))
    torch.autograd._enable_record_function(False)  # NCCL runs no operators of torch that an observer would see
    try:
        pending = getattr(link, name)(*tensors, *rest)
    finally:
        torch.autograd._enable_record_function(True)
    work = c10d.PythonCallbackWork(pending.wait)
    if link.coalesced is not None:
        link.coalesced.append(work)
    return (arguments[0], work.boxed()) if name in OUTPUTS_AND_WORK else work.boxed()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # the same memory


def _blank(tensors: Tensors) -> list[torch.Tensor]:
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]


def _run(stream: torch.cuda.Stream) -> None:
    ctypes.CDLL(None).cudasim_run(ctypes.c_void_p(stream.cuda_stream))


@functools.cache
def _register() -> torch.library.Library:
    """Replace torch's kernels until the returned library is deleted."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*registered kernel")  # replacing kernels is the purpose here
        for name in WORK + OUTPUTS_AND_WORK:
            library.impl(name, functools.partial(_kernel, name), "CUDA")
    return library


def _start_coalescing(group: c10d.ProcessGroup, device: torch.device) -> None:
    _link(group._get_backend(device)).coalesced = []


def _end_coalescing(group: c10d.ProcessGroup, device: torch.device) -> c10d.Work:
    link = _link(group._get_backend(device))
    works, link.coalesced = link.coalesced, None
    return c10d.PythonCallbackWork(lambda timeout: all([work.wait() for work in works or []]))


def install(module: ModuleType | None = None) -> None:
    """Replace NCCL by the stand-in.

    Args:
        module: `torch.distributed.distributed_c10d`, while it is being imported.
    """
    if module is None:
        import torch.distributed.distributed_c10d as module

        torch.distributed.ProcessGroupNCCL = HostNccl
    module.ProcessGroupNCCL = HostNccl
    c10d.ProcessGroup._start_coalescing, c10d.ProcessGroup._end_coalescing = _start_coalescing, _end_coalescing
