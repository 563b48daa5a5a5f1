"""Detailed recordings name the storages that each operator reads and writes, by unique numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from memplug import native
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Trace, still_live
from tests.support import rows
from tests.support.recording import nothing_left, operator_names, record, recorder, trainer

__all__ = ["nothing_left", "recorder"]


def detailed(recorder: Recorder, step: Callable[[], Any]) -> Trace:
    return record(recorder, step, Detail.TENSORS)


def only(trace: Trace, name: str) -> rows.OpEvent:
    """Return the one operator of that name."""
    (index,) = [index for index, found in enumerate(operator_names(trace)) if found == name]
    return rows.operator(trace, index)


def sizes(trace: Trace, numbers: tuple[int, ...]) -> list[tuple[int, str]]:
    return [(int(trace.tensors["nbytes"][number]), trace.dtypes[trace.tensors["dtype"][number]]) for number in numbers]


# -- uses --------------------------------------------------------------------------------------------------------------


def test_uses_name_the_storages_of_a_small_program(recorder: Recorder) -> None:
    x = torch.ones(6, dtype=torch.float64)
    other = torch.ones(6)
    made: list[torch.Tensor] = []

    def program() -> None:
        a = x + other
        b = a * a
        made.extend((a, b, b.sum()))

    trace = detailed(recorder, program)
    add, multiply, total = (only(trace, name) for name in ("aten::add.Tensor", "aten::mul.Tensor", "aten::sum"))
    assert sizes(trace, add.reads) == [(48, "float64"), (24, "float32")]
    assert sizes(trace, add.writes) == [(48, "float64")]
    assert multiply.reads == (*add.writes, *add.writes)
    assert total.reads == multiply.writes and multiply.writes != add.writes
    assert sizes(trace, total.writes) == [(8, "float64")]
    inner = only(trace, "aten::sum.dim_IntList")
    assert (inner.index, inner.reads, inner.writes) == (total.index + 1, total.reads, total.writes)
    assert len(trace.tensors) == 6, "these five, and `other` as float64"


def test_list_of_tensors_counts_as_its_elements_except_none(recorder: Recorder) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    table, rows = torch.ones(4, 4), torch.tensor([1, 2])
    trace = detailed(recorder, lambda: (torch.cat(parts), table[:, rows], torch.nn.functional.linear(table, table)))
    cat, index, linear = (only(trace, f"aten::{name}") for name in ("cat", "index.Tensor", "linear"))
    assert sizes(trace, cat.reads) == [(8, "float32"), (12, "float32")]
    assert sizes(trace, cat.writes) == [(20, "float32")]
    assert sizes(trace, index.reads[-1:]) == [(16, "int64")] and len(set(index.reads)) == 2
    assert linear.reads == (index.reads[0],) * 2


def test_operator_with_several_results_writes_all_of_them(recorder: Recorder) -> None:
    x = torch.arange(8.0)
    trace = detailed(recorder, lambda: (x.sort(), x.split(4)))
    assert sizes(trace, only(trace, "aten::sort").writes) == [(32, "float32"), (64, "int64")]
    split = only(trace, "aten::split.Tensor")
    assert split.writes == (*split.reads, *split.reads)


def test_views_and_in_place_results_share_one_storage(recorder: Recorder) -> None:
    x = torch.ones(4, 4)
    trace = detailed(recorder, lambda: x.t()[1:].view(torch.int32).detach().zero_())
    numbers = {number for event in rows.operators(trace) for number in (*event.reads, *event.writes)}
    assert numbers == {0} and sizes(trace, (0,)) == [(64, "float32")]
    assert only(trace, "aten::zero_").writes == (0,)


def test_recorded_size_of_a_storage_is_the_largest_seen(recorder: Recorder) -> None:
    x = torch.ones(4)

    def program() -> None:
        x.exp_()
        x.untyped_storage().resize_(400)
        x.exp_()
        x.untyped_storage().resize_(40)
        x.exp_()

    trace = detailed(recorder, program)
    assert sizes(trace, (0,)) == [(400, "float32")] and len(trace.tensors) == 1


@pytest.mark.parametrize(
    "dtype", sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str), ids=str
)
def test_dtypes_have_torch_names(dtype: torch.dtype, recorder: Recorder) -> None:
    trace = detailed(recorder, lambda: torch.empty(8, dtype=dtype))
    assert trace.dtypes == (str(dtype).removeprefix("torch."),)


def test_only_storages_on_the_recorded_device_are_seen(recorder: Recorder) -> None:
    on_meta = torch.ones(4, device="meta")
    sparse = torch.eye(3).to_sparse()
    trace = detailed(recorder, lambda: (on_meta + 1, torch.sparse.sum(sparse), on_meta.new_ones(2, device="cpu")))
    assert only(trace, "aten::new_ones").reads == ()
    assert sizes(trace, only(trace, "aten::new_ones").writes) == [(8, "float32")]


# -- numbers of storages -----------------------------------------------------------------------------------------------


def test_new_storage_at_a_reused_address_has_its_own_number(recorder: Recorder) -> None:
    addresses = []

    def program() -> None:
        for _ in range(50):
            x = torch.empty(1000)
            addresses.append(x.data_ptr())
            del x

    trace = detailed(recorder, program)
    writes = [rows.operator(trace, index).writes for index in range(len(trace.operators))]
    assert len(set(addresses)) < 50, "no address was reused, so the test shows nothing"
    assert writes == [(number,) for number in range(50)]


def test_storage_numbers_restart_with_each_recording(recorder: Recorder) -> None:
    x, y = torch.ones(4), torch.ones(8)
    for first, second in ((x, y), (y, x)):
        trace = detailed(recorder, lambda first=first, second=second: (first.exp_(), second.exp_()))
        assert [event.reads for event in rows.operators(trace)] == [(0,), (1,)]
        assert trace.tensors["nbytes"].tolist() == [first.nbytes, second.nbytes]


def test_recorded_storages_agree_with_requests(recorder: Recorder) -> None:
    step = trainer()
    trace = detailed(recorder, step)
    made = trace.requests["nbytes"][trace.requests["malloc_thread"] == 0].tolist()
    seen = trace.tensors["nbytes"].tolist()
    for nbytes in made:
        seen.remove(nbytes)
    steady = len(seen)
    again = detailed(recorder, step)
    assert len(again.tensors) == len(made) + steady, "storages made in the step, and those from before it"
    assert np.array_equal(again.uses, trace.uses) and np.array_equal(again.tensors, trace.tensors)


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_detailed_recording_keeps_no_memory_alive(recorder: Recorder) -> None:
    step = trainer(rows=64)
    plain, fine = record(recorder, step), detailed(recorder, step)
    assert fine.peak_bytes == plain.peak_bytes > 0
    assert np.array_equal(fine.operators["in_use_bytes"], plain.operators["in_use_bytes"])
    assert np.array_equal(fine.live_bytes, plain.live_bytes)
    assert not still_live(fine.requests).any()


def test_memory_is_freed_with_its_last_reference(recorder: Recorder) -> None:
    live = []

    def program() -> None:
        tensors = [torch.ones(100)]
        tensors.append(tensors[0].view(10, 10).mul(2).t())
        live.append(native.load().tracked_bytes())
        while tensors:
            tensors.pop()
            live.append(native.load().tracked_bytes())

    detailed(recorder, program)
    assert live == [800, 400, 0]
