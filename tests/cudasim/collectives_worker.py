"""Runs every collective on tensors of the device, and on the host over gloo; writes a file for each rank.

Started by a launcher: `torchrun --nproc-per-node 2 -m tests.cudasim.collectives_worker FOLDER`. `FOLDER/RANK.json` gets

* "differ": collectives whose results differ from gloo's, as "schedule: name, type";
* "violations": unordered accesses in these collectives, by schedule;
* "not waited": for each collective, the number of races if its result is read without a wait; null if the rank gets no
  result;
* "dropped": for each collective, the number of races if its work and tensors are dropped, and no result is read;
* "pending after a barrier": unfinished tasks of the device.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers `torch.ops._c10d_functional`

from tests.cudasim import device
from tests.cudasim.device import SCHEDULES, Schedule, scheduled

DTYPES = [torch.float32, torch.bfloat16, torch.int64]
Make = Callable[..., torch.Tensor]
Issued = tuple[Any, list[torch.Tensor]]
"""The work to wait for, and the tensors that have the results after the wait."""
Issue = Callable[[Any, Make], Issued]


def numbers(dtype: torch.dtype) -> Make:
    """Return a function that makes tensors on the host, different ones on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return lambda *shape: torch.randint(-8, 8, shape, generator=generator, device="cpu").to(dtype)


def _single(function: Callable[..., Any], scale: tuple[int, int], **fields: Any) -> Issue:
    """Return a collective of one input and one output; `scale` is the ratio of their numbers of rows."""

    def issue(group: Any, make: Make) -> Issued:
        given, taken = make(4 * scale[0], 3), make(4 * scale[1], 3)
        return function(taken, given, group=group, async_op=True, **fields), [taken]

    return issue


def _in_place(function: Callable[..., Any], *arguments: Any, **fields: Any) -> Issue:
    def issue(group: Any, make: Make) -> Issued:
        tensor = make(5, 3)
        work = function(tensor, *arguments, group=group, async_op=True, **fields)
        return work, [tensor] if function is not dist.reduce or dist.get_rank() == arguments[0] else []

    return issue


def _to_lists(function: Callable[..., Any], lists: str, **fields: Any) -> Issue:
    """Return a collective whose outputs ("o"), inputs ("i") or both are lists with a tensor for each rank."""

    def issue(group: Any, make: Make) -> Issued:
        taken = [make(2, 3) for _ in range(2)] if "o" in lists else [make(2, 3)]
        given = [make(2, 3) for _ in range(2)] if "i" in lists else [make(2, 3)]
        at_root = dist.get_rank() == fields.get("dst", fields.get("src", dist.get_rank()))
        first = taken if "o" in lists else taken[0]
        second = given if "i" in lists else given[0]
        if function is dist.gather:
            return function(second, first if at_root else None, group=group, async_op=True, **fields), taken * at_root
        second = second if at_root else None
        if function is dist.all_to_all and not taken[0].is_cuda:  # gloo has no all_to_all of lists
            whole = torch.cat(taken)
            dist.all_to_all_single(whole, torch.cat(given), group=group)
            return None, list(whole.chunk(2))
        return function(first, second, group=group, async_op=True, **fields), taken

    return issue


def _uneven(group: Any, make: Make) -> Issued:
    """Exchange uneven rows: rank 0 keeps one row and sends two; rank 1 sends three and keeps none."""
    given_rows, taken_rows = [([1, 2], [1, 3]), ([3, 0], [2, 0])][dist.get_rank()]
    given, taken = make(sum(given_rows), 2), make(sum(taken_rows), 2)
    return dist.all_to_all_single(taken, given, taken_rows, given_rows, group=group, async_op=True), [taken]


def _coalesced(function: Callable[..., Any], scale: tuple[int, int]) -> Issue:
    def issue(group: Any, make: Make) -> Issued:
        given, taken = [make(4 * scale[0], n) for n in (1, 3)], [make(4 * scale[1], n) for n in (1, 3)]
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as work:
            for tensors in zip(given if function is dist.all_reduce else taken, given, strict=True):
                function(*tensors[: 1 if function is dist.all_reduce else 2], group=group)
        return work, given if function is dist.all_reduce else taken

    return issue


def _point_to_point(group: Any, make: Make) -> Issued:
    """Exchange a tensor; both ranks send before they receive."""
    given, taken, other = make(3, 3), make(3, 3), 1 - dist.get_rank()
    sent, received = dist.isend(given, other, group), dist.irecv(taken, other, group)
    return [sent, received], [taken]


def _batched(group: Any, make: Make) -> Issued:
    given, taken, other = make(3, 3), make(3, 3), 1 - dist.get_rank()
    operations = [dist.P2POp(dist.irecv, taken, other, group), dist.P2POp(dist.isend, given, other, group)]
    return dist.batch_isend_irecv(operations), [taken]


class _Functional:
    """Work that `wait_tensor` waits for."""

    def __init__(self, result: torch.Tensor):
        self.result = result

    def wait(self) -> None:
        torch.ops._c10d_functional.wait_tensor(self.result)


def _functional(name: str, *arguments: Any) -> Issue:
    def issue(group: Any, make: Make) -> Issued:
        result = getattr(torch.ops._c10d_functional, name)(make(4, 3), *arguments, group.group_name)
        return _Functional(result), [result]

    return issue


def _mean(group: Any, make: Make) -> Issued:
    """Average a tensor; on the host by a sum, since gloo has no average."""
    tensor = make(5, 3)
    if tensor.is_cuda:
        return dist.all_reduce(tensor, dist.ReduceOp.AVG, group, async_op=True), [tensor]
    dist.all_reduce(tensor, group=group)
    return None, [(tensor.double() / 2).to(tensor.dtype)]


gather_single, scatter_single = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
COLLECTIVES: dict[str, Issue] = {
    "allreduce": _in_place(dist.all_reduce),
    "allreduce, maximum": _in_place(dist.all_reduce, dist.ReduceOp.MAX),
    "allreduce, mean": _mean,
    "allreduce, coalesced": _coalesced(dist.all_reduce, (1, 1)),
    "broadcast": _in_place(dist.broadcast, 1),
    "reduce": _in_place(dist.reduce, 1),
    "allgather": _to_lists(dist.all_gather, "o"),
    "_allgather_base": _single(gather_single, (1, 2)),
    "allgather_into_tensor_coalesced": _coalesced(gather_single, (1, 2)),
    "reduce_scatter": _to_lists(dist.reduce_scatter, "i"),
    "_reduce_scatter_base": _single(scatter_single, (2, 1)),
    "reduce_scatter_tensor_coalesced": _coalesced(scatter_single, (2, 1)),
    "gather": _to_lists(dist.gather, "o", dst=1),
    "scatter": _to_lists(dist.scatter, "i", src=1),
    "alltoall": _to_lists(dist.all_to_all, "oi"),
    "alltoall_base": _single(dist.all_to_all_single, (1, 1)),
    "alltoall_base, uneven": _uneven,
    "send and recv": _point_to_point,
    "batch_isend_irecv": _batched,
    "functional all_reduce": _functional("all_reduce", "sum"),
    "functional all_gather_into_tensor": _functional("all_gather_into_tensor", 2),
    "functional reduce_scatter_tensor": _functional("reduce_scatter_tensor", "sum", 2),
    "functional all_to_all_single": _functional("all_to_all_single", [2, 2], [2, 2]),
    "functional broadcast": _functional("broadcast", 1),
}


def finish(work: Any) -> None:
    """Wait for one work, for several or for none."""
    for one in work if isinstance(work, list) else [work]:
        if one is not None:
            one.wait()


def use_memory() -> None:
    """Write to all free memory, none of which a collective may still have to read or write."""
    for nbytes in [64, 512, 1024] * 8:
        torch.full((nbytes,), 7, dtype=torch.uint8, device="cuda")
    kept = [torch.full((512,), 7, dtype=torch.uint8, device="cuda") for _ in range(16)]
    del kept


def on_host(name: str, dtype: torch.dtype, group: Any) -> list[torch.Tensor]:
    """Return a collective's results by gloo."""
    work, results = COLLECTIVES[name](group, numbers(dtype))
    finish(work)
    return results


def on_device(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return a collective's results by NCCL's stand-in; the inputs are dropped before the collective is done."""
    make = numbers(dtype)
    work, results = COLLECTIVES[name](dist.group.WORLD, lambda *shape: make(*shape).cuda())
    use_memory()
    finish(work)
    return [(result + 0).cpu() for result in results]


def races_without_wait(name: str) -> int | None:
    """Return the number of races if results are read without a wait; None if this rank gets no result."""
    make, before = numbers(torch.float32), device.violations()
    work, results = COLLECTIVES[name](dist.group.WORLD, lambda *shape: make(*shape).cuda())
    for result in results:
        result + 0
    finish(work)
    torch.cuda.synchronize()
    return device.violations() - before if results else None


def races_of_dropped(name: str) -> int:
    """Return the number of races if the work is dropped with all of its tensors, and no result is read."""
    make, before = numbers(torch.float32), device.violations()
    work, results = COLLECTIVES[name](dist.group.WORLD, lambda *shape: make(*shape).cuda())
    del work, results
    use_memory()
    torch.cuda.synchronize()
    return device.violations() - before


def main() -> None:
    """Join the other rank and run all collectives."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    assert dist.get_backend() == "nccl"
    gloo = dist.new_group(backend="gloo")
    expected = {(name, dtype): on_host(name, dtype, gloo) for name in COLLECTIVES for dtype in DTYPES}
    differ, violations = [], {}
    for schedule in [*SCHEDULES, Schedule("random", 1)]:
        before = device.violations()
        with scheduled(schedule):
            for (name, dtype), theirs in expected.items():
                ours = on_device(name, dtype)
                if len(ours) != len(theirs) or not all(map(torch.equal, ours, theirs)):
                    differ.append(f"{schedule}: {name}, {dtype}")
        violations[str(schedule)] = device.violations() - before
    with scheduled(Schedule("lazy")):
        torch.ones(3, device="cuda").mul_(2)
        dist.barrier()
        after_barrier = device.pending()
        not_waited = {name: races_without_wait(name) for name in COLLECTIVES}
        dropped = {name: races_of_dropped(name) for name in COLLECTIVES if "send" not in name}
    found = {"differ": differ, "violations": violations, "not waited": not_waited, "dropped": dropped}
    found["pending after a barrier"] = after_barrier
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
